// Pre-activations that are kept only if the experts have no more rows than there is memory for.
#include <limits>

#include "layer_test.h"

namespace guild::test {

namespace {

class KeptRows : public LayerTest {};

TEST_P(KeptRows, UpProjection) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const x = l.input(l.input_rows(), l.s.hidden);
  UpWeights weights(l.device, p, p.dtype);
  Matrix halves[2];
  for (Matrix& half : halves) {
    half = l.random(l.s.experts * l.s.intermediate, l.s.hidden, .1, p.dtype);
  }
  weights.set(halves);
  Tensor h = l.output(l.s.rows(), p.width()), a = l.output(l.s.rows(), l.s.intermediate);
  UpProjection step{.sizes = l.s,
                    .dtype = p.dtype,
                    .activation = p.act.activation,
                    .order = p.order(),
                    .routing = l.routing(),
                    .x = x.view(),
                    .h = h.view(),
                    .a = a.view()};
  step.w_up = {weights.view().gate, weights.view().up};
  l.device.run(step);
  auto const whole = used_rows(h, "h"), activated = used_rows(a, "a");
  for (int64_t const rows : {l.used(), l.used() / 2, int64_t(0)}) {
    Tensor kept = l.output(rows, p.width());
    step.h = rows == 0 ? h.view() : kept.view();  // not null, so something is to be kept
    step.h_rows = rows;
    h.poison();
    run_twice(step, {&a});
    EXPECT_TRUE(used_rows(a, "a") == activated)
        << "a differs with room for " << rows << " rows of h";
    kept.expect_untouched_from(rows, "h");
    if (rows == l.used()) {
      EXPECT_TRUE(kept.get() == whole) << "h differs where it just fits";
    }
  }
  h.expect_untouched_from(0, "h");
}

TEST_P(KeptRows, DownGradient) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  if (l.used() == 0) return;
  auto const dout = l.input(l.input_rows(), l.s.hidden);
  Matrix const values = l.random(l.used(), p.width(), 1, p.dtype);
  Matrix spoilt = values, whole(l.s.rows(), p.width());
  for (double& v : spoilt.values) v = std::numeric_limits<double>::quiet_NaN();
  std::copy(values.values.begin(), values.values.end(), whole.values.begin());
  auto const kept = l.input_of(values, p.dtype, true), none = l.input_of(spoilt, p.dtype, true);
  auto const again = l.input_of(whole, p.dtype, true);
  auto const w_down = l.input(l.s.experts * l.s.hidden, l.s.intermediate, .1, false);
  Tensor dh = l.output(l.s.rows(), p.width()), a = l.output(l.s.rows(), l.s.intermediate);
  Tensor db_up(l.device, p.dtype, l.s.experts, p.width());
  Tensor db_down(l.device, p.dtype, l.s.experts, l.s.hidden);
  Bytes const workspace(l.device, down_gradient_workspace_bytes(l.s, p.gated()));
  DownGradient step;
  step.sizes = l.s, step.dtype = p.dtype, step.activation = p.act.activation;
  step.order = p.order(), step.routing = l.routing(), step.dout = dout.view();
  step.w_down = {w_down.view().data, l.s.hidden * l.s.intermediate, l.s.intermediate, 1};
  step.h = again.view(), step.dh = dh.view(), step.a_scaled = a.view();
  step.db_up = db_up.view(), step.db_down = db_down.view(), step.db_dtype = p.dtype;
  step.workspace = workspace.data();
  std::vector<Tensor*> const outputs{&dh, &a, &db_up, &db_down};
  auto const found = [&] {
    run_twice(step, outputs);
    std::vector<std::vector<std::byte>> bits;
    for (Tensor* t : outputs) bits.push_back(t->raw());
    return bits;
  };
  auto const plain = found();
  step.needed = step.routing.offsets + l.s.experts;
  step.h = kept.view(), step.h_again = none.view(), step.h_rows = l.used();
  EXPECT_TRUE(found() == plain) << "h is not read where it holds all rows";
  step.h = none.view(), step.h_again = again.view(), step.h_rows = l.used() - 1;
  EXPECT_TRUE(found() == plain) << "h_again is not read where there are more rows";
}

GUILD_LAYER_TESTS(KeptRows, true);

}  // namespace

}  // namespace guild::test
