// What every op promises besides its numbers: the same bits for any number of threads, NaN that
// stays in its own row, and no row beyond the layer's.
#include <omp.h>

#include <cmath>
#include <limits>
#include <memory>

#include "guild/cpu.h"
#include "layer_test.h"

namespace guild::test {

namespace {

class Contract : public LayerTest {
 protected:
  void SetUp() override {
    LayerTest::SetUp();
    Layer& l = layer();
    for (Matrix& half : w_up_) {
      half = l.random(l.s.experts * l.s.intermediate, l.s.hidden, 0.2, l.p.dtype);
    }
    weights_.emplace(l.device, l.p, l.p.dtype).set(w_up_);
    w_down_ = l.input(l.s.experts * l.s.hidden, l.s.intermediate, 0.2, false);
    x_ = l.input(l.input_rows(), l.s.hidden);
    dout_ = l.input(l.input_rows(), l.s.hidden);
  }

  MoeForward forward(Tensor const& h, Tensor const& o, Bytes const& workspace) {
    Layer& l = layer();
    MoeForward f;
    f.sizes = l.s, f.dtype = l.p.dtype, f.activation = l.p.act.activation, f.order = l.p.order();
    f.routing = l.routing(), f.x = x_.view(), f.h = h.view(), f.o = o.view();
    f.w_up = {weights_->view().gate, weights_->view().up};
    f.w_down = {w_down_.view().data, l.s.hidden * l.s.intermediate, l.s.intermediate, 1};
    f.workspace = workspace.data();
    return f;
  }

  // All bytes that a forward and backward pass writes.
  std::vector<std::vector<std::byte>> results();

  Matrix w_up_[2];
  std::optional<UpWeights> weights_;
  Layer::Input w_down_, x_, dout_;
};

std::vector<std::vector<std::byte>> Contract::results() {
  Layer& l = layer();
  LayerParam const& p = l.p;
  int64_t const out_rows = p.shape.sorted ? l.s.rows() : l.s.tokens;
  Bytes const workspace(l.device, std::max(moe_forward_workspace_bytes(l.s, p.dtype),
                                           moe_backward_workspace_bytes(l.s, p.dtype, p.gated())));
  Tensor h = l.output(l.s.rows(), p.width()), o = l.output(out_rows, l.s.hidden);
  Tensor dx = l.output(out_rows, l.s.hidden);
  Tensor dw_down(l.device, DType::float32, l.s.experts * l.s.hidden, l.s.intermediate);
  Tensor db_up(l.device, DType::float32, l.s.experts, p.width());
  Tensor db_down(l.device, DType::float32, l.s.experts, l.s.hidden);
  UpWeights dw_up(l.device, p, DType::float32);
  Tensor dscores(l.device, l.score_dtype(), l.s.tokens, l.s.top_k);
  MoeForward const f = forward(h, o, workspace);
  l.device.run(f);
  MoeBackward b;
  b.sizes = l.s, b.dtype = p.dtype, b.dw_dtype = DType::float32, b.activation = f.activation;
  b.order = f.order, b.routing = f.routing, b.dout = dout_.view(), b.x = f.x, b.h = h.view();
  b.w_up = f.w_up, b.w_down = f.w_down, b.dx = dx.view(), b.dw_up = dw_up.view();
  b.dw_down = {dw_down.data(), l.s.hidden * l.s.intermediate, l.s.intermediate, 1};
  b.db_up = db_up.view(), b.db_down = db_down.view();
  b.dscores = p.shape.sorted ? nullptr : dscores.data();
  b.workspace = workspace.data();
  l.device.run(b);
  return {h.raw(),       o.raw(),     dx.raw(),      dw_up.raw(),
          dw_down.raw(), db_up.raw(), db_down.raw(), dscores.raw()};
}

TEST_P(Contract, AnyNumberOfThreadsGivesTheSameBits) {
  if (layer().p.on_cuda) return;  // threads are the CPU backend's
  int const before = omp_get_max_threads();
  omp_set_num_threads(1);
  auto const alone = results();
  for (int threads : {2, 5}) {
    omp_set_num_threads(threads);
    EXPECT_TRUE(alone == results()) << threads << " threads";
  }
  omp_set_num_threads(before);
}

TEST_P(Contract, NanStaysInItsToken) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  int64_t const out_rows = p.shape.sorted ? l.s.rows() : l.s.tokens;
  if (l.used() == 0) return;  // no row to spoil
  Bytes const workspace(l.device, moe_forward_workspace_bytes(l.s, p.dtype));
  Tensor h = l.output(l.s.rows(), p.width()), o = l.output(out_rows, l.s.hidden);
  MoeForward const f = forward(h, o, workspace);
  l.device.run(f);
  auto const clean = o.get();
  int64_t const spoilt = p.shape.sorted ? l.used() / 2 : l.rowing.row_token[l.used() / 2];
  Matrix x = x_.host;
  x(spoilt, l.s.hidden / 2) = std::numeric_limits<double>::quiet_NaN();
  x_.device->set(x.values);
  o.poison();
  l.device.run(f);
  auto const dirty = o.get();
  for (size_t i = 0; i < dirty.size(); ++i) {
    if (int64_t(i) / l.s.hidden == spoilt) {
      ASSERT_TRUE(std::isnan(dirty[i])) << "column " << i % l.s.hidden << " of the spoilt row";
    } else if (!p.shape.sorted || int64_t(i) / l.s.hidden < l.used()) {
      ASSERT_EQ(dirty[i], clean[i]) << "row " << i / l.s.hidden;
    }
  }
}

GUILD_LAYER_TESTS(Contract, false);

// A slot's row outside [0, R) counts as none, like -1. Memory past the end of Y is NaN here.
TEST(SlotsOfNoRow, AddNothing) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<int32_t> const slot_row{1, 3, -1, 0};
  std::vector<float> const y{1, 2, 4, nan}, parts{3, 5, 7, nan};
  std::vector<int32_t> const token_offsets{0, 2, 3};  // of three slots, and so of three rows
  std::vector<float> o(2), dscores(3);
  Combine sum;
  sum.sizes = {.tokens = 2, .hidden = 1, .intermediate = 1, .experts = 1, .slots = 3};
  sum.dtype = DType::float32, sum.y = {y.data()}, sum.o = {o.data()};
  sum.routing.slot_row = slot_row.data(), sum.routing.token_offsets = token_offsets.data();
  cpu::combine(sum);
  EXPECT_EQ(o, (std::vector<float>{2, 0}));
  ScoreGradient scores;
  scores.sizes = sum.sizes, scores.dtype = DType::float32, scores.routing = sum.routing;
  scores.score_parts = parts.data(), scores.dscores = dscores.data();
  cpu::score_gradient(scores);
  EXPECT_EQ(dscores, (std::vector<float>{5, 0, 0}));
}

// Where there are no tokens no slot has a gradient, whatever its row: dO has no rows to read.
TEST(SlotsOfNoTokens, AddNothing) {
  std::vector<int32_t> const slot_row{0}, offsets{0, 1, 1}, token_offsets{0};
  std::vector<float> const parts{1}, bias(8, 1.f);
  std::vector<float> dscores{7};
  auto const no_rows = std::make_unique<float[]>(0);
  ScoreGradient scores;
  scores.sizes = {.hidden = 4, .intermediate = 4, .experts = 2, .top_k = 1, .slots = 1};
  scores.dtype = DType::float32;
  scores.routing.offsets = offsets.data(), scores.routing.slot_row = slot_row.data();
  scores.routing.token_offsets = token_offsets.data();
  scores.score_parts = parts.data(), scores.dscores = dscores.data();
  scores.bias.data = bias.data(), scores.dout.data = no_rows.get();
  cpu::score_gradient(scores);
  EXPECT_EQ(dscores[0], 0);
}

}  // namespace

}  // namespace guild::test
