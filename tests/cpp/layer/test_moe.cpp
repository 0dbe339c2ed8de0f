// The composites, forward and backward, against the reference run step by step.
#include <algorithm>
#include <cmath>
#include <utility>

#include "guild/cpu.h"
#include "layer_test.h"

namespace guild::test {

namespace {

class Moe : public LayerTest {
 protected:
  void SetUp() override {
    LayerTest::SetUp();
    Layer& l = layer();
    double const scale = 1 / std::sqrt(double(l.s.hidden));
    for (Matrix& half : w_up_) {
      half = l.random(l.s.experts * l.s.intermediate, l.s.hidden, scale, l.p.dtype);
    }
    weights_.emplace(l.device, l.p, l.p.dtype).set(w_up_);
    w_down_ = l.input(l.s.experts * l.s.hidden, l.s.intermediate, scale, false);
    if (!l.p.bias) return;
    b_up_ = l.input(l.s.experts, l.p.width());
    b_down_ = l.input(l.s.experts, l.s.hidden);
  }

  ConstUpWeight up_view() const { return {weights_->view().gate, weights_->view().up}; }
  ConstWeight down_view() const {
    int64_t const in = layer().s.intermediate;
    return {w_down_.view().data, layer().s.hidden * in, in, 1};
  }
  int64_t output_rows() const {
    return layer().p.shape.sorted ? layer().s.rows() : layer().s.tokens;
  }
  // What an output by token (or, sorted, by row) holds.
  std::vector<double> result(Tensor const& t, char const* name) const {
    if (layer().p.shape.sorted) return used_rows(t, name);
    t.expect_untouched_from(t.rows(), name);
    return t.get();
  }

  template <class F>
  Matrix forward(Reference<F> const& r, Matrix const& x, Matrix const& residual, Matrix& h) const {
    Matrix a;
    r.up_projection(x, w_up_, b_up_.host, h, a);
    Matrix const y = r.down_projection(a, w_down_.host, b_down_.host);
    return layer().p.shape.sorted ? y : r.combine(y, layer().scores, residual);
  }

  struct Gradients {
    Matrix dx, dw_gate, dw_up, dw_down, db_up, db_down, dscores;
  };
  template <class F>
  Gradients backward(Reference<F> const& r, Matrix const& x, Matrix const& h,
                     Matrix const& dout) const;

  Layer const& layer() const { return const_cast<Moe*>(this)->LayerTest::layer(); }
  Layer& layer() { return LayerTest::layer(); }

  Matrix w_up_[2];
  std::optional<UpWeights> weights_;
  Layer::Input w_down_, b_up_, b_down_;
};

template <class F>
Moe::Gradients Moe::backward(Reference<F> const& r, Matrix const& x, Matrix const& h,
                             Matrix const& dout) const {
  Layer const& l = layer();
  Gradients g;
  Matrix dh, a, score_sum;
  r.down_gradient(dout, w_down_.host, h, l.row_scores, dh, a, score_sum);
  if (!l.p.shape.sorted) g.dscores = r.score_gradient(score_sum, dout, b_down_.host);
  auto const from_dout = [&](int64_t row, int64_t j) { return dout(r.source(row), j); };
  auto const from_x = [&](int64_t row, int64_t j) { return x(r.source(row), j); };
  auto const from_a = [&](int64_t row, int64_t i) { return a(row, i); };
  auto const from_dh = [&](int64_t row, int64_t i) { return dh(row, i); };
  auto const one = [](int64_t, int64_t) { return 1.0; };
  auto const score = [&](int64_t row, int64_t) { return l.row_scores(row, 0); };
  DType const stored = l.p.dtype;
  int64_t const hidden = l.s.hidden, inner = l.s.intermediate;
  auto const half = [&](bool up) {
    auto const column = [&](int64_t row, int64_t i) { return dh(row, r.column(up, i)); };
    return r.weight_gradient(inner, hidden, column, from_x, {}, stored);
  };
  g.dw_gate = half(false);
  if (l.p.gated()) g.dw_up = half(true);
  g.dw_down = r.weight_gradient(hidden, inner, from_dout, from_a, {}, stored);
  g.db_up = r.weight_gradient(1, l.p.width(), one, from_dh, {}, stored);
  g.db_down = r.weight_gradient(1, hidden, score, from_dout, {}, stored);
  Matrix const dx = r.up_gradient(dh, w_up_);
  g.dx = l.p.shape.sorted ? dx : r.combine(dx, {});
  return g;
}

TEST_P(Moe, Forward) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const x = l.input(l.input_rows(), l.s.hidden);
  Layer::Input const residual =
      p.bias && !p.shape.sorted ? l.input(l.s.tokens, l.s.hidden) : Layer::Input{};
  Bytes workspace(l.device, moe_forward_workspace_bytes(l.s, p.dtype));
  Tensor h = l.output(l.s.rows(), p.width()), o = l.output(output_rows(), l.s.hidden);
  MoeForward step{l.s,      p.dtype,   p.act.activation, p.order(),      l.routing(),
                  x.view(), up_view(), down_view(),      b_up_.view(),   b_down_.view(),
                  h.view(), o.view(),  workspace.data(), residual.view()};
  run_twice(step, {&h, &o});
  EXPECT_TRUE(workspace.canaries_alive()) << "workspace: written past its ends";
  Matrix truth_h, yard_h;
  Matrix const truth = forward(l.truth(), x.host, residual.host, truth_h);
  Matrix const yard = forward(l.yardstick(), x.host, residual.host, yard_h);
  expect_close(used_rows(h, "h"), truth_h.values, yard_h.values, p.dtype, "h");
  expect_close(result(o, "o"), truth.values, yard.values, p.dtype, "o");

  auto const kept = o.raw();
  step.h = {};
  run_twice(step, {&o});
  EXPECT_TRUE(kept == o.raw()) << "o differs in inference";
}

// Inputs, outputs and the call of a whole backward.
struct BackwardCall {
  Layer& l;
  Layer::Input x = l.input(l.input_rows(), l.s.hidden), h = l.input(l.s.rows(), l.p.width());
  Layer::Input dout = l.input(l.input_rows(), l.s.hidden);
  Bytes workspace{l.device, moe_backward_workspace_bytes(l.s, l.p.dtype, l.p.gated())};
  Tensor dx = l.output(l.p.shape.sorted ? l.s.rows() : l.s.tokens, l.s.hidden);
  UpWeights dw_up{l.device, l.p, l.p.dtype};
  Tensor dw_down{l.device, l.p.dtype, l.s.experts * l.s.hidden, l.s.intermediate};
  Tensor db_up{l.device, l.p.dtype, l.s.experts, l.p.width()};
  Tensor db_down{l.device, l.p.dtype, l.s.experts, l.s.hidden};
  Tensor dscores{l.device, l.score_dtype(), l.s.tokens, l.s.top_k};

  MoeBackward step(ConstUpWeight const& w_up, ConstWeight const& w_down, ConstRows b_down) {
    MoeBackward b;
    b.sizes = l.s, b.dtype = b.dw_dtype = l.p.dtype;
    b.activation = l.p.act.activation, b.order = l.p.order(), b.routing = l.routing();
    b.dout = dout.view(), b.x = x.view(), b.h = h.view();
    b.w_up = w_up, b.w_down = w_down, b.b_down = b_down;
    b.dx = dx.view(), b.dw_up = dw_up.view();
    b.dw_down = {dw_down.data(), l.s.hidden * l.s.intermediate, l.s.intermediate, 1};
    b.db_up = db_up.view(), b.db_down = db_down.view();
    if (!l.p.shape.sorted) b.dscores = dscores.data();
    b.workspace = workspace.data();
    return b;
  }
};

TEST_P(Moe, Backward) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  BackwardCall call{l};
  auto& [_, x, h, dout, workspace, dx, dw_up, dw_down, db_up, db_down, dscores] = call;
  MoeBackward step = call.step(up_view(), down_view(), b_down_.view());
  run_twice(step, {&dx, &dw_down, &db_up, &db_down, &dscores});
  EXPECT_TRUE(workspace.canaries_alive()) << "workspace: written past its ends";

  Gradients const t = backward(l.truth(), x.host, h.host, dout.host);
  Gradients const y = backward(l.yardstick(), x.host, h.host, dout.host);
  auto const close = [&](std::vector<double> const& out, Matrix Gradients::* field,
                         char const* name, DType stored) {
    expect_close(out, (t.*field).values, (y.*field).values, stored, name);
  };
  close(result(dx, "dx"), &Gradients::dx, "dx", p.dtype);
  close(dw_up.half(false).values, &Gradients::dw_gate, "dw gate", p.dtype);
  if (p.gated()) close(dw_up.half(true).values, &Gradients::dw_up, "dw up", p.dtype);
  close(dw_down.get(), &Gradients::dw_down, "dw_down", p.dtype);
  close(db_up.get(), &Gradients::db_up, "db_up", p.dtype);
  close(db_down.get(), &Gradients::db_down, "db_down", p.dtype);
  if (!p.shape.sorted) close(dscores.get(), &Gradients::dscores, "dscores", l.score_dtype());

  auto const kept = dx.raw();  // dX alone: nothing else is asked for, nothing else changes
  step.dw_up = {}, step.dw_down = {}, step.db_up = {}, step.db_down = {}, step.dscores = nullptr;
  run_twice(step, {&dx});
  EXPECT_TRUE(kept == dx.raw()) << "dx differs when nothing else is asked for";

  if (p.shape.sorted) return;
  bool const combines = false;  // dX by row: the caller combines
  Bytes less(l.device, moe_backward_workspace_bytes(l.s, p.dtype, p.gated(), combines));
  Tensor dx_rows = l.output(l.s.rows(), l.s.hidden);
  step.dx = {}, step.dx_rows = dx_rows.view(), step.workspace = less.data();
  run_twice(step, {&dx_rows});
  EXPECT_TRUE(less.canaries_alive()) << "workspace: written past its ends";
  dx.poison();
  Routing sum = l.routing();
  sum.slot_score = nullptr;
  l.device.run(Combine{l.s, p.dtype, sum, dx_rows.view(), dx.view()});
  EXPECT_TRUE(kept == dx.raw()) << "dx differs when the caller combines";
}

// Room for the rows in use, and no more, changes no bit; less leaves out rows and writes past none.
TEST_P(Moe, Room) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  if (p.shape.sorted || l.used() == 0) return;
  BackwardCall call{l};
  Tensor o = l.output(l.s.tokens, l.s.hidden);
  MoeForward forward;
  forward.dtype = p.dtype, forward.activation = p.act.activation, forward.order = p.order();
  forward.routing = l.routing(), forward.x = call.x.view();
  forward.w_up = up_view(), forward.w_down = down_view();
  forward.b_up = b_up_.view(), forward.b_down = b_down_.view();
  MoeBackward backward = call.step(up_view(), down_view(), b_down_.view());
  std::vector<Tensor*> const outputs{&o, &call.dx, &call.dw_down, &call.db_up, &call.dscores};
  auto const results = [&](int64_t room) {
    for (Tensor* out : outputs) out->poison();
    Sizes s = l.s;
    s.room = room;
    Bytes work(l.device, moe_forward_workspace_bytes(s, p.dtype));
    Bytes more(l.device, moe_backward_workspace_bytes(s, p.dtype, p.gated()));
    Tensor h = l.output(s.rows(), p.width());
    forward.sizes = backward.sizes = s;
    forward.h = h.view(), forward.o = o.view(), forward.workspace = work.data();
    backward.h = h.view(), backward.workspace = more.data();
    l.device.run(forward);
    l.device.run(backward);
    EXPECT_TRUE(work.canaries_alive() && more.canaries_alive()) << "past a workspace's ends";
    h.expect_untouched_from(std::min(l.used(), s.rows()), "h");
    std::vector<std::vector<std::byte>> raw;
    for (Tensor* out : outputs) {
      out->expect_untouched_from(out->rows(), "an output");
      raw.push_back(out->raw());
    }
    return raw;
  };
  auto const expected = results(-1);
  EXPECT_TRUE(expected == results(l.used()));
  EXPECT_FALSE(expected == results(l.used() / 2));
}

// Backward up to dH and A', then the weight gradients: the same bits as all at once.
TEST_P(Moe, WeightGradientsOnTheirOwn) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  BackwardCall call{l};
  MoeBackward step = call.step(up_view(), down_view(), b_down_.view());
  l.device.run(step);
  auto const dx = call.dx.raw(), dw_up = call.dw_up.raw(), dw_down = call.dw_down.raw();
  auto const db_up = call.db_up.raw(), dscores = call.dscores.raw();
  for (Tensor* out : {&call.dx, &call.dw_down, &call.db_up, &call.dscores}) out->poison();
  call.dw_up.poison();

  bool const combines = !p.shape.sorted, biases = true, keeps = true;
  Bytes less(l.device,
             moe_backward_workspace_bytes(l.s, p.dtype, p.gated(), combines, biases, keeps));
  Tensor dh = l.output(l.s.rows(), p.width()), a = l.output(l.s.rows(), l.s.intermediate);
  step.dh = dh.view(), step.a_scaled = a.view(), step.workspace = less.data();
  UpWeight const up = std::exchange(step.dw_up, {});
  Weight const down = std::exchange(step.dw_down, {});
  l.device.run(step);
  EXPECT_TRUE(less.canaries_alive()) << "workspace: written past its ends";
  EXPECT_TRUE(dx == call.dx.raw()) << "dx";
  EXPECT_TRUE(db_up == call.db_up.raw()) << "db_up";
  EXPECT_TRUE(p.shape.sorted || dscores == call.dscores.raw()) << "dscores";

  Bytes memory(l.device, moe_weight_gradients_workspace_bytes(l.s));
  MoeWeightGradients later{l.s,       p.dtype,     p.dtype,       false,        p.gated(),
                           p.order(), l.routing(), call.x.view(), step.dout,    dh.view(),
                           a.view(),  up,          down,          memory.data()};
  l.device.run(later);
  EXPECT_TRUE(memory.canaries_alive()) << "workspace: written past its ends";
  EXPECT_TRUE(dw_up == call.dw_up.raw()) << "dw_up";
  EXPECT_TRUE(dw_down == call.dw_down.raw()) << "dw_down";
  call.dw_up.poison(), call.dw_down.poison();
  for (bool const of_up : {true, false}) {  // one alone; the other's operands are not read
    MoeWeightGradients one = later;
    if (of_up) one.dw_down = {}, one.dout = {}, one.a_scaled = {};
    if (!of_up) one.dw_up = {}, one.x = {}, one.dh = {};
    l.device.run(one);
  }
  EXPECT_TRUE(dw_up == call.dw_up.raw()) << "dw_up alone";
  EXPECT_TRUE(dw_down == call.dw_down.raw()) << "dw_down alone";
}

// Tokens without a slot, and no workspace: their gradient is zero.
TEST(MoeWithoutRows, BackwardClearsDx) {
  float const nowhere[4 * 8] = {};
  int32_t const offsets[3] = {}, token_offsets[4] = {};
  float dx[3 * 4];
  std::fill_n(dx, 12, NAN);
  MoeBackward b;
  b.sizes = {.tokens = 3, .hidden = 4, .intermediate = 4, .experts = 2, .slots = 0};
  b.dtype = b.dw_dtype = DType::float32;
  b.activation.gated = false;
  b.routing.offsets = offsets, b.routing.token_offsets = token_offsets;
  b.dout = b.x = {nowhere};
  ConstWeight const weight{nowhere, 16, 4, 1};
  b.w_up = {weight, weight}, b.w_down = weight;
  b.dx = {dx};
  ASSERT_EQ(moe_backward_workspace_bytes(b.sizes, b.dtype, false, true, false), 0);
  cpu::moe_backward(b);
  for (float const value : dx) EXPECT_EQ(value, 0);
}

GUILD_LAYER_TESTS(Moe, false);

}  // namespace

}  // namespace guild::test
