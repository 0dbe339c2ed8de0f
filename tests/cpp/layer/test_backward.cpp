// Gradients of the activations, the scores and the inputs against the reference.
#include "layer_test.h"

namespace guild::test {

namespace {

class Backward : public LayerTest {};
class BackwardLayouts : public LayerTest {};

ConstWeight down_weight(Layer::Input const& w, int64_t hidden) {
  int64_t const stride = w.view().stride;
  return {w.view().data, hidden * stride, stride, 1};
}

TEST_P(BackwardLayouts, DownGradient) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const dout = l.input(l.input_rows(), l.s.hidden);
  auto const w =
      l.input(l.s.experts * l.s.hidden, l.s.intermediate, 1 / std::sqrt(double(l.s.hidden)));
  auto const h = l.input(l.s.rows(), p.width());
  Tensor dh = l.output(l.s.rows(), p.width()), a = l.output(l.s.rows(), l.s.intermediate);
  Tensor parts(l.device, l.score_dtype(), l.s.rows(), score_parts(l.s));
  DownGradient step{l.s,
                    p.dtype,
                    p.act.activation,
                    p.order(),
                    l.routing(),
                    dout.view(),
                    down_weight(w, l.s.hidden),
                    h.view(),
                    dh.view(),
                    a.view(),
                    parts.data()};
  run_twice(step, {&dh, &a, &parts});

  Matrix truth[3], yard[3];
  l.truth().down_gradient(dout.host, w.host, h.host, l.row_scores, truth[0], truth[1], truth[2]);
  l.yardstick().down_gradient(dout.host, w.host, h.host, l.row_scores, yard[0], yard[1], yard[2]);
  expect_close(used_rows(dh, "dh"), truth[0].values, yard[0].values, p.dtype, "dh");
  expect_close(used_rows(a, "a_scaled"), truth[1].values, yard[1].values, p.dtype, "a_scaled");
  auto const partial = used_rows(parts, "score_parts");
  std::vector<double> sums(l.used());
  for (size_t i = 0; i < partial.size(); ++i) sums[i / score_parts(l.s)] += partial[i];
  expect_close(sums, truth[2].values, yard[2].values, l.score_dtype(), "sum of score_parts");

  auto const kept = dh.raw();
  step.a_scaled = {}, step.score_parts = nullptr;
  run_twice(step, {&dh});
  EXPECT_TRUE(kept == dh.raw()) << "dh differs when nothing else is asked for";
}

TEST_P(Backward, DownGradientWithoutScores) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const dout = l.input(l.input_rows(), l.s.hidden);
  auto const w = l.input(l.s.experts * l.s.hidden, l.s.intermediate);
  auto const h = l.input(l.s.rows(), p.width());
  Tensor dh = l.output(l.s.rows(), p.width()), a = l.output(l.s.rows(), l.s.intermediate);
  Routing routing = l.routing();
  routing.row_score = nullptr;
  run_twice(DownGradient{l.s, p.dtype, p.act.activation, p.order(), routing, dout.view(),
                         down_weight(w, l.s.hidden), h.view(), dh.view(), a.view(), nullptr},
            {&dh, &a});
  Matrix truth[3], yard[3];
  l.truth().down_gradient(dout.host, w.host, h.host, {}, truth[0], truth[1], truth[2]);
  l.yardstick().down_gradient(dout.host, w.host, h.host, {}, yard[0], yard[1], yard[2]);
  expect_close(used_rows(dh, "dh"), truth[0].values, yard[0].values, p.dtype, "dh");
  expect_close(used_rows(a, "a"), truth[1].values, yard[1].values, p.dtype, "a");
}

TEST_P(Backward, ScoreGradient) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  if (p.shape.sorted) return;  // they have no slots
  auto const parts = l.input_of(l.random(l.s.rows(), score_parts(l.s), 1, l.score_dtype()),
                                l.score_dtype(), false);
  Layer::Input dout, bias;
  if (p.bias) {
    dout = l.input(l.s.tokens, l.s.hidden);
    bias = l.input(l.s.experts, l.s.hidden);
  }
  Tensor dscores(l.device, l.score_dtype(), l.s.tokens, l.s.top_k);
  run_twice(ScoreGradient{l.s, p.dtype, l.routing(), parts.view().data, dout.view(), bias.view(),
                          dscores.data()},
            {&dscores});
  dscores.expect_untouched_from(l.s.tokens, "dscores");
  expect_close(dscores.get(), l.truth().score_gradient(parts.host, dout.host, bias.host).values,
               l.yardstick().score_gradient(parts.host, dout.host, bias.host).values,
               l.score_dtype(), "dscores");
}

TEST_P(BackwardLayouts, UpGradient) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const dh = l.input(l.s.rows(), p.width());
  Matrix halves[2];
  for (Matrix& half : halves) {
    half = l.random(l.s.experts * l.s.intermediate, l.s.hidden, 1, p.dtype);
  }
  UpWeights weights(l.device, p, p.dtype);
  weights.set(halves);
  Tensor dx = l.output(l.s.rows(), l.s.hidden);
  UpGradient step{l.s, p.dtype, p.gated(), p.order(), l.routing(), dh.view(), {}, dx.view()};
  step.w_up = {weights.view().gate, weights.view().up};
  run_twice(step, {&dx});
  expect_close(used_rows(dx, "dx"), l.truth().up_gradient(dh.host, halves).values,
               l.yardstick().up_gradient(dh.host, halves).values, p.dtype, "dx");
}

GUILD_LAYER_TESTS(Backward, false);
GUILD_LAYER_TESTS(BackwardLayouts, true);

}  // namespace

}  // namespace guild::test
