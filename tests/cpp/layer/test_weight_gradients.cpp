// Gradients of weights and biases against the reference: written or added, in the layer's type or
// in float32, in every layout.
#include <cmath>
#include <limits>

#include "layer_test.h"

namespace guild::test {

namespace {

struct Mode {
  DType stored;
  bool add;
};

class WeightGradients : public LayerTest {
 protected:
  std::vector<Mode> modes() { return {{layer().p.dtype, false}, {DType::float32, true}}; }

  // The output before the call: random numbers if the gradient is added to them, else nothing.
  Matrix start(int64_t rows, int64_t cols, Mode mode) {
    return mode.add ? layer().random(rows, cols, 3, mode.stored) : Matrix();
  }

  template <class Left, class Right>
  void expect_gradient(std::vector<double> const& dw, int64_t outs, int64_t ins, Left left,
                       Right right, Matrix const& before, Mode mode, char const* name) {
    auto const truth = layer().truth().weight_gradient(outs, ins, left, right, before, mode.stored);
    auto const yardstick =
        layer().yardstick().weight_gradient(outs, ins, left, right, before, mode.stored);
    expect_close(dw, truth.values, yardstick.values, mode.stored, name);
    for (int64_t e = 0; e < layer().s.experts; ++e) {  // nothing added: exact, not merely close
      if (layer().rowing.offsets[e] != layer().rowing.offsets[e + 1]) continue;
      for (int64_t i = e * outs * ins; i < (e + 1) * outs * ins; ++i) {
        ASSERT_EQ(dw[i], mode.add ? before.values[i] : 0) << name << " of an expert without rows";
      }
    }
  }
};

class WeightGradientLayouts : public WeightGradients {};

TEST_P(WeightGradientLayouts, Up) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const x = l.input(l.input_rows(), l.s.hidden), dh = l.input(l.s.rows(), p.width());
  int64_t const rows = l.s.experts * l.s.intermediate;
  for (Mode const mode : modes()) {
    Matrix const before[2] = {start(rows, l.s.hidden, mode), start(rows, l.s.hidden, mode)};
    UpWeights dw(l.device, p, mode.stored);
    UpWeightGradient const step{l.s,       p.dtype,     mode.stored, mode.add,  p.gated(),
                                p.order(), l.routing(), x.view(),    dh.view(), dw.view()};
    std::vector<std::byte> first;
    for (int run = 0; run < 2; ++run) {
      mode.add ? dw.set(before) : dw.poison();
      l.device.run(step);
      if (run == 0) first = dw.raw();
    }
    EXPECT_TRUE(first == dw.raw()) << "dw differs in a second run";
    dw.expect_untouched_around("dw");
    for (int up = 0; up < (p.gated() ? 2 : 1); ++up) {
      auto const column = [&](int64_t r, int64_t i) { return dh.host(r, l.truth().column(up, i)); };
      auto const input = [&](int64_t r, int64_t j) { return x.host(l.truth().source(r), j); };
      expect_gradient(dw.half(up).values, l.s.intermediate, l.s.hidden, column, input, before[up],
                      mode, up ? "dw up" : "dw gate");
    }
  }
}

TEST_P(WeightGradients, Down) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const dout = l.input(l.input_rows(), l.s.hidden);
  auto const a = l.input(l.s.rows(), l.s.intermediate);
  auto const left = [&](int64_t r, int64_t j) { return dout.host(l.truth().source(r), j); };
  auto const right = [&](int64_t r, int64_t i) { return a.host(r, i); };
  for (Mode const mode : modes()) {
    Matrix const before = start(l.s.experts * l.s.hidden, l.s.intermediate, mode);
    Tensor dw(l.device, mode.stored, l.s.experts * l.s.hidden, l.s.intermediate);
    Weight const out{dw.data(), l.s.hidden * l.s.intermediate, l.s.intermediate, 1};
    run_twice(DownWeightGradient{l.s, p.dtype, mode.stored, mode.add, l.routing(), dout.view(),
                                 a.view(), out},
              {&dw}, [&] { mode.add ? dw.set(before.values) : dw.poison(); });
    dw.expect_untouched_from(dw.rows(), "dw");
    expect_gradient(dw.get(), l.s.hidden, l.s.intermediate, left, right, before, mode, "dw_down");
  }
}

TEST_P(WeightGradients, DownTransposed) {  // dW2 stored (E, I, H)
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const dout = l.input(l.input_rows(), l.s.hidden);
  auto const a = l.input(l.s.rows(), l.s.intermediate);
  Mode const mode{p.dtype, false};
  Tensor dw(l.device, p.dtype, l.s.experts * l.s.intermediate, l.s.hidden);
  Weight const out{dw.data(), l.s.hidden * l.s.intermediate, 1, l.s.hidden};
  run_twice(
      DownWeightGradient{l.s, p.dtype, p.dtype, false, l.routing(), dout.view(), a.view(), out},
      {&dw});
  dw.expect_untouched_from(dw.rows(), "dw");
  auto const left = [&](int64_t r, int64_t i) { return a.host(r, i); };
  auto const right = [&](int64_t r, int64_t j) { return dout.host(l.truth().source(r), j); };
  expect_gradient(dw.get(), l.s.intermediate, l.s.hidden, left, right, {}, mode, "dw_down");
}

TEST_P(WeightGradients, UpBias) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const dh = l.input(l.s.rows(), p.width());
  auto const one = [](int64_t, int64_t) { return 1.0; };
  auto const right = [&](int64_t r, int64_t j) { return dh.host(r, j); };
  Routing sorted;
  sorted.offsets = l.routing().offsets;
  for (Mode const mode : modes()) {
    Matrix const before = start(l.s.experts, p.width(), mode);
    Tensor db(l.device, mode.stored, l.s.experts, p.width());
    run_twice(BiasGradient{l.s.rows(), p.width(), l.s.experts, p.dtype, mode.stored, mode.add,
                           sorted, dh.view(), db.view()},
              {&db}, [&] { mode.add ? db.set(before.values) : db.poison(); });
    db.expect_untouched_from(l.s.experts, "db_up");
    expect_gradient(db.get(), 1, p.width(), one, right, before, mode, "db_up");
  }
}

TEST_P(WeightGradients, DownBias) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const dout = l.input(l.input_rows(), l.s.hidden);
  auto const left = [&](int64_t r, int64_t) { return l.row_scores(r, 0); };
  auto const right = [&](int64_t r, int64_t j) { return dout.host(l.truth().source(r), j); };
  for (Mode const mode : modes()) {
    Matrix const before = start(l.s.experts, l.s.hidden, mode);
    Tensor db(l.device, mode.stored, l.s.experts, l.s.hidden);
    run_twice(BiasGradient{l.s.rows(), l.s.hidden, l.s.experts, p.dtype, mode.stored, mode.add,
                           l.routing(), dout.view(), db.view(), l.s.tokens},
              {&db}, [&] { mode.add ? db.set(before.values) : db.poison(); });
    db.expect_untouched_from(l.s.experts, "db_down");
    expect_gradient(db.get(), 1, l.s.hidden, left, right, before, mode, "db_down");
  }
}

// An expert's last step ends where the next one's rows begin.
TEST_P(WeightGradients, NanStaysInItsExpert) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  double const nan = std::numeric_limits<double>::quiet_NaN();
  auto dout = l.input(l.input_rows(), l.s.hidden), a = l.input(l.s.rows(), l.s.intermediate);
  int64_t const size = l.s.hidden * l.s.intermediate;
  Tensor dw(l.device, p.dtype, l.s.experts * l.s.hidden, l.s.intermediate);
  Weight const out{dw.data(), size, l.s.intermediate, 1};
  DownWeightGradient const step{l.s,         p.dtype,     p.dtype,  false,
                                l.routing(), dout.view(), a.view(), out};
  run_twice(step, {&dw});
  auto const clean = dw.get();
  // Every other expert that has rows; of a gathered dO rows are those of tokens, not of experts.
  std::vector<bool> spoilt(l.s.experts);
  bool next = false;
  for (int64_t e = 0; e < l.s.experts; ++e) {
    int64_t const begin = l.rowing.offsets[e], end = l.rowing.offsets[e + 1];
    if (begin == end) continue;
    spoilt[e] = next, next = !next;
    for (int64_t r = begin; spoilt[e] && r < end; ++r) {
      for (int64_t j = 0; j < a.host.cols; ++j) a.host(r, j) = nan;
      for (int64_t j = 0; p.shape.sorted && j < dout.host.cols; ++j) dout.host(r, j) = nan;
    }
  }
  a.device->set(a.host.values), dout.device->set(dout.host.values);
  run_twice(step, {&dw});
  auto const dirty = dw.get();
  for (int64_t i = 0; i < l.s.experts * size; ++i) {
    if (spoilt[i / size]) {
      ASSERT_TRUE(std::isnan(dirty[i])) << "NaN was lost in dw_down of expert " << i / size;
    } else {
      ASSERT_EQ(dirty[i], clean[i]) << "dw_down of expert " << i / size;
    }
  }
}

GUILD_LAYER_TESTS(WeightGradients, false);
GUILD_LAYER_TESTS(WeightGradientLayouts, true);

}  // namespace

}  // namespace guild::test
