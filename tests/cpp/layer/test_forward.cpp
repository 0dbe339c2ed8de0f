// Up projection, down projection and combine against the reference.
#include "layer_test.h"

namespace guild::test {

namespace {

class Forward : public LayerTest {};
class ForwardLayouts : public LayerTest {};

TEST_P(ForwardLayouts, UpProjection) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const x = l.input(l.input_rows(), l.s.hidden);
  Matrix halves[2];
  for (Matrix& half : halves) {
    half = l.random(l.s.experts * l.s.intermediate, l.s.hidden, 1 / std::sqrt(double(l.s.hidden)),
                    p.dtype);
  }
  UpWeights weights(l.device, p, p.dtype);
  weights.set(halves);
  Layer::Input const bias = p.bias ? l.input(l.s.experts, p.width()) : Layer::Input{};
  Tensor h = l.output(l.s.rows(), p.width()), a = l.output(l.s.rows(), l.s.intermediate);
  UpProjection step{l.s,      p.dtype, p.act.activation, p.order(), l.routing(),
                    x.view(), {},      bias.view(),      h.view(),  a.view()};
  step.w_up = {weights.view().gate, weights.view().up};
  run_twice(step, {&h, &a});

  Matrix truth_h, truth_a, yard_h, yard_a;
  l.truth().up_projection(x.host, halves, bias.host, truth_h, truth_a);
  l.yardstick().up_projection(x.host, halves, bias.host, yard_h, yard_a);
  expect_close(used_rows(h, "h"), truth_h.values, yard_h.values, p.dtype, "h");
  expect_close(used_rows(a, "a"), truth_a.values, yard_a.values, p.dtype, "a");

  auto const kept = a.raw();
  step.h = {};  // inference: the same activations without H
  run_twice(step, {&a});
  EXPECT_TRUE(kept == a.raw()) << "a differs when h is not kept";
}

TEST_P(Forward, DownProjection) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const a = l.input(l.s.rows(), l.s.intermediate);
  auto const w = l.input(l.s.experts * l.s.hidden, l.s.intermediate);
  Layer::Input const bias = p.bias ? l.input(l.s.experts, l.s.hidden) : Layer::Input{};
  Tensor y = l.output(l.s.rows(), l.s.hidden);
  int64_t const stride = w.view().stride;
  ConstWeight const w_down{w.view().data, l.s.hidden * stride, stride, 1};
  run_twice(DownProjection{l.s, p.dtype, l.routing(), a.view(), w_down, bias.view(), y.view()},
            {&y});
  expect_close(used_rows(y, "y"), l.truth().down_projection(a.host, w.host, bias.host).values,
               l.yardstick().down_projection(a.host, w.host, bias.host).values, p.dtype, "y");
}

TEST_P(Forward, DownProjectionTransposed) {  // W2 stored (E, I, H)
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const a = l.input(l.s.rows(), l.s.intermediate);
  auto const stored = l.input(l.s.experts * l.s.intermediate, l.s.hidden);
  Matrix w(l.s.experts * l.s.hidden, l.s.intermediate);
  for (int64_t r = 0; r < stored.host.rows; ++r) {
    int64_t const e = r / l.s.intermediate, i = r % l.s.intermediate;
    for (int64_t j = 0; j < l.s.hidden; ++j) w(e * l.s.hidden + j, i) = stored.host(r, j);
  }
  Tensor y = l.output(l.s.rows(), l.s.hidden);
  int64_t const stride = stored.view().stride;
  ConstWeight const w_down{stored.view().data, l.s.intermediate * stride, 1, stride};
  run_twice(DownProjection{l.s, p.dtype, l.routing(), a.view(), w_down, {}, y.view()}, {&y});
  expect_close(used_rows(y, "y"), l.truth().down_projection(a.host, w, {}).values,
               l.yardstick().down_projection(a.host, w, {}).values, p.dtype, "y");
}

TEST_P(Forward, Combine) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  if (p.shape.sorted) return;  // they are not combined
  auto const y = l.input(l.s.rows(), l.s.hidden);
  for (bool scored : {true, false}) {
    Routing routing = l.routing();
    if (!scored) routing.slot_score = nullptr;
    Matrix const scores = scored ? l.scores : Matrix();
    Tensor o = l.output(l.s.tokens, l.s.hidden);
    run_twice(Combine{l.s, p.dtype, routing, y.view(), o.view()}, {&o});
    o.expect_untouched_from(l.s.tokens, "o");
    expect_close(o.get(), l.truth().combine(y.host, scores).values,
                 l.yardstick().combine(y.host, scores).values, p.dtype, "o");
  }
}

TEST_P(Forward, CombineWithResidual) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  if (p.shape.sorted) return;
  auto const y = l.input(l.s.rows(), l.s.hidden), residual = l.input(l.s.tokens, l.s.hidden);
  Tensor o = l.output(l.s.tokens, l.s.hidden);
  Combine step{l.s, p.dtype, l.routing(), y.view(), o.view(), residual.view()};
  run_twice(step, {&o});
  o.expect_untouched_from(l.s.tokens, "o");
  expect_close(o.get(), l.truth().combine(y.host, l.scores, residual.host).values,
               l.yardstick().combine(y.host, l.scores, residual.host).values, p.dtype, "o");

  Tensor in_place = l.output(l.s.tokens, l.s.hidden);
  in_place.set(residual.host.values);
  step.o = in_place.view(), step.residual = in_place.view();
  l.device.run(step);
  EXPECT_TRUE(o.get() == in_place.get()) << "o differs where it was the residual";
}

// The same bits as with a residual that is scaled and rounded before.
TEST_P(Forward, CombineWithScaledResidual) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  if (p.shape.sorted) return;
  auto const y = l.input(l.s.rows(), l.s.hidden), residual = l.input(l.s.tokens, l.s.hidden);
  auto const scale =
      l.input_of(l.random(l.s.tokens, 1, 1, l.score_dtype()), l.score_dtype(), /*strided=*/false);
  Matrix scaled = residual.host;
  for (int64_t t = 0; t < l.s.tokens; ++t) {
    for (int64_t j = 0; j < l.s.hidden; ++j) {
      double const product = round_to(l.score_dtype(), scale.host(t, 0) * scaled(t, j));
      scaled(t, j) = round_to(p.dtype, product);
    }
  }
  auto const before = l.input_of(scaled, p.dtype, /*strided=*/true);
  Tensor o = l.output(l.s.tokens, l.s.hidden), wanted = l.output(l.s.tokens, l.s.hidden);
  Combine step{l.s, p.dtype, l.routing(), y.view(), wanted.view(), before.view()};
  l.device.run(step);
  step.o = o.view(), step.residual = residual.view();
  step.residual_scale = scale.device->data();
  run_twice(step, {&o});
  o.expect_untouched_from(l.s.tokens, "o");
  EXPECT_TRUE(o.get() == wanted.get());
}

GUILD_LAYER_TESTS(Forward, false);
GUILD_LAYER_TESTS(ForwardLayouts, true);

}  // namespace

}  // namespace guild::test
