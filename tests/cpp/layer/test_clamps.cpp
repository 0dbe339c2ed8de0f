// Gradients at the exact limit of a clamp, which cuts off only what lies beyond it.
#include <cmath>
#include <random>

#include "device_test.h"
#include "layer.h"
#include "shared/activation.h"

namespace guild::test {

namespace {

// Limits that every element type has, before and after the activation; relu gives the gate itself.
std::vector<NamedActivation> clamped_activations() {
  using Kind = Activation::Kind;
  return {{"gpt_oss", {Kind::silu, true, 1.702f, 7, 1}},
          {"silu_after", {Kind::silu, true, 1, 0.5f, 0, true}},
          {"relu", {Kind::relu, true, 1, 0.5f, 0}},
          {"relu_after", {Kind::relu, true, 1, 0.5f, 0, true}},
          {"gelu_tanh", {Kind::gelu_tanh, false, 1, 2, 0}},
          {"gelu_erf", {Kind::gelu_erf, true, 1, 2, 0.25f}},
          {"relu_squared_after", {Kind::relu_squared, false, 1, 4, 0, true}}};
}

// At a limit, at the gate whose square is limit 4, inside and outside.
std::vector<double> values_around(double limit) {
  return {limit, -limit, limit / 2, -limit / 2, 2 * limit, -2 * limit, 0};
}

TEST(Clamps, CutOnlyWhatIsBeyond) {
  for (NamedActivation const& named : clamped_activations()) {
    SCOPED_TRACE(named.name);
    for (double gate : values_around(named.activation.limit)) {
      for (double up : values_around(named.activation.limit)) {
        auto const expected = activated(named.activation, gate, up);
        auto const d = activate_gradient(named.activation, gate, up, 1.0);
        EXPECT_NEAR(d.a, expected.a, 1e-12) << gate << " " << up;
        EXPECT_NEAR(d.dgate, expected.da_dgate, 1e-12) << gate << " " << up;
        if (!named.activation.gated) continue;
        EXPECT_NEAR(d.dup, expected.da_dup, 1e-12) << gate << " " << up;
      }
    }
  }
}

// Kernels compiled for silu clamped before have the bits of those for all activations.
TEST(Clamps, TheFamilyOfClampedSiluIsPartOfSigmoid) {
  ActivationOf<float> const act{Activation::Kind::silu, true, 1.702f, 7, 1};
  ASSERT_EQ(family_of(act), Family::sigmoid);
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 4);
  std::vector<float> values{0.f, -0.f, 7.f, 1e-40f, 1e20f, -1e20f, INFINITY, -INFINITY};
  for (int i = 0; i < 200; ++i) values.push_back(normal(random));
  for (float gate : values) {
    for (float up : values) {
      EXPECT_EQ(activate<Family::clamped>(act, gate, up), activate<Family::sigmoid>(act, gate, up))
          << gate << " " << up;
      auto const own = activate_gradient<Family::clamped>(act, gate, up, 0.5f);
      auto const all = activate_gradient<Family::sigmoid>(act, gate, up, 0.5f);
      EXPECT_EQ(own.a, all.a) << gate << " " << up;
      EXPECT_EQ(own.dgate, all.dgate) << gate << " " << up;
      EXPECT_EQ(own.dup, all.dup) << gate << " " << up;
    }
  }
}

class ClampTest : public DeviceTest {};

TEST_P(ClampTest, DownGradientPassesAtTheLimit) {
  for (NamedActivation const& act : clamped_activations()) {
    for (DType dtype : dtypes()) {
      SCOPED_TRACE(act.name + " " + name_of(dtype));
      LayerParam p;
      p.shape.name = "clamps", p.shape.routing = "random", p.shape.sizes = {70, 64, 72, 2, 1};
      p.act = act, p.dtype = dtype, p.on_cuda = on_cuda();
      Layer l(device(), p);
      Matrix values(l.s.rows(), p.width());
      auto const around = values_around(act.activation.limit);
      std::mt19937 random(1);  // every pair of them
      for (double& v : values.values) v = around[random() % around.size()];
      auto const h = l.input_of(values, dtype, false);
      auto const dout = l.input(l.s.tokens, l.s.hidden);
      auto const w = l.input(l.s.experts * l.s.hidden, l.s.intermediate);
      Tensor dh = l.output(l.s.rows(), p.width()), a = l.output(l.s.rows(), l.s.intermediate);
      ConstWeight const w_down{w.view().data, l.s.hidden * l.s.intermediate, l.s.intermediate, 1};
      device().run(DownGradient{l.s, dtype, act.activation, p.order(), l.routing(), dout.view(),
                                w_down, h.view(), dh.view(), a.view()});
      Matrix truth[3], yard[3];
      l.truth().down_gradient(dout.host, w.host, values, l.row_scores, truth[0], truth[1],
                              truth[2]);
      l.yardstick().down_gradient(dout.host, w.host, values, l.row_scores, yard[0], yard[1],
                                  yard[2]);
      expect_close(dh.get(), truth[0].values, yard[0].values, dtype, "dh");
      expect_close(a.get(), truth[1].values, yard[1].values, dtype, "a_scaled");
    }
  }
}

GUILD_DEVICE_TESTS(ClampTest);

}  // namespace

}  // namespace guild::test
