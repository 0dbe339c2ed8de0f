// Activations of gates as large as their type holds, and of infinities: where an activation has a
// limit, neither its value nor its slope is NaN.
#include <limits>

#include "device_test.h"
#include "layer.h"
#include "shared/activation.h"

namespace guild::test {

namespace {

using Kind = Activation::Kind;

constexpr Kind kKinds[] = {Kind::silu, Kind::gelu_tanh, Kind::gelu_erf, Kind::relu,
                           Kind::relu_squared};

// What value and slope tend to.
Pair<double> limit_of(Kind kind, double gate) {
  if (gate < 0) return {0, 0};
  if (kind == Kind::relu_squared) return {gate * gate, 2 * gate};
  return {gate, 1};
}

template <class F>
void expect_limits() {
  F const most = std::numeric_limits<F>::max(), infinity = std::numeric_limits<F>::infinity();
  for (Kind const kind : kKinds) {
    for (F const size : {F(1e4), F(1e10), F(2e19), F(7e19), F(1e30), most / 2, most, infinity}) {
      for (F const gate : {size, -size}) {
        SCOPED_TRACE(testing::Message() << "kind " << int(kind) << ", gate " << gate);
        auto const [value, slope] = limit_of(kind, gate);
        for (bool const gated : {false, true}) {
          Activation const act{kind, gated};
          EXPECT_EQ(activate(act, gate, F(1)), F(value));
          auto const d = activate_gradient(act, gate, F(1), F(1));
          EXPECT_EQ(d.a, F(value));
          EXPECT_EQ(d.dgate, F(slope));
          EXPECT_EQ(d.dup, gated ? F(value) : F(0));
        }
        Activation act{kind, false, 1, 7};  // clamped gates have no slope
        EXPECT_NEAR(activate(act, gate, F(1)), gate < 0 ? 0 : activate(act, F(7), F(1)), 1e-5);
        EXPECT_EQ(activate_gradient(act, gate, F(1), F(1)).dgate, 0);
        act.clamp_after = true;
        EXPECT_EQ(activate(act, gate, F(1)), gate < 0 ? 0 : 7);
        EXPECT_EQ(activate_gradient(act, gate, F(1), F(1)).dgate, 0);
      }
    }
  }
}

TEST(HugeGates, HaveLimits) {
  expect_limits<float>();
  expect_limits<double>();
}

class HugeGates : public DeviceTest {};

// With g = 1 everywhere, dH is the slope and A' the value.
TEST_P(HugeGates, DownGradient) {
  for (Kind const kind : {Kind::silu, Kind::gelu_tanh, Kind::gelu_erf, Kind::relu}) {
    for (DType dtype : dtypes()) {
      SCOPED_TRACE(testing::Message() << "kind " << int(kind) << ", " << name_of(dtype));
      LayerParam p;
      p.shape.name = "huge", p.shape.routing = "random", p.shape.sizes = {70, 64, 72, 2, 1};
      p.act.activation = {kind, false}, p.dtype = dtype, p.on_cuda = on_cuda();
      Layer l(device(), p);
      double const most = dtype == DType::float16 ? 65504 : 0x1.fep127;
      Matrix gates(l.s.rows(), l.s.intermediate), dout(l.s.tokens, l.s.hidden);
      Matrix w(l.s.experts * l.s.hidden, l.s.intermediate);
      for (size_t i = 0; i < gates.values.size(); ++i) {
        gates.values[i] = std::ldexp(i % 2 ? most : -most, -int(i % 5) * (most > 1e5 ? 20 : 1));
      }
      for (int64_t t = 0; t < l.s.tokens; ++t) dout(t, 0) = 1;
      for (double& v : w.values) v = 1;
      auto const h = l.input_of(gates, dtype, false), x = l.input_of(dout, dtype, false);
      auto const weight = l.input_of(w, dtype, false);
      Tensor dh = l.output(l.s.rows(), l.s.intermediate);
      Tensor a = l.output(l.s.rows(), l.s.intermediate);
      Routing routing = l.routing();
      routing.row_score = nullptr;
      ConstWeight const w_down{weight.view().data, l.s.hidden * l.s.intermediate, l.s.intermediate,
                               1};
      device().run(DownGradient{l.s, dtype, p.act.activation, p.order(), routing, x.view(), w_down,
                                h.view(), dh.view(), a.view()});
      auto const slopes = dh.get(), values = a.get();
      for (size_t i = 0; i < slopes.size(); ++i) {
        auto const [value, slope] = limit_of(kind, gates.values[i]);
        ASSERT_EQ(slopes[i], slope) << "gate " << gates.values[i];
        ASSERT_EQ(values[i], value) << "gate " << gates.values[i];
      }
    }
  }
}

GUILD_DEVICE_TESTS(HugeGates);

}  // namespace

}  // namespace guild::test
