// With g = dO[row_token] W2: dH = d activation(s * g, H), A' = s * A, score parts = <g, A>; db1 and
// db2 are summed separately afterwards
#include "checks/check.h"
#include "cpu/activate.h"
#include "cpu/low_rank.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/gemm_config.h"

namespace guild::cpu {

namespace {

// The columns of one partial sum of dS: blocks of kBlockColumns hold whole ones.
constexpr int64_t kPartColumns = kScoreColumns;
static_assert(kBlockColumns % kPartColumns == 0);

// One row from its g on: gradients, A' and partial sums for the block's columns.
template <class T>
void finish_row(DownGradient const& x, int64_t row, Span cols, Compute<T> const* g,
                Compute<T>* scratch) {
  using F = Compute<T>;
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  int64_t const width = s.intermediate * (gated ? 2 : 1);
  F *const gate = scratch, *const up = gate + cols.count, *const a = up + cols.count;
  Half const halves[] = {gate_half(x.order, gated), up_half(x.order, s.intermediate)};
  auto const at = [&](auto* data, int half) {
    return data + halves[half].first + cols.first * halves[half].stride;
  };
  bool const again = x.h_again.data != nullptr && *x.needed > x.h_rows;
  T const* const h = rows_of<T>(again ? x.h_again : x.h, width).row(row);
  load(at(h, 0), halves[0].stride, gate, cols.count);
  if (gated) load(at(h, 1), halves[1].stride, up, cols.count);

  auto const* const scores = static_cast<F const*>(x.routing.row_score);
  F const score = scores == nullptr ? F(1) : scores[row];
  auto* const parts = static_cast<F*>(x.score_parts);
  for (int64_t j = 0; j < cols.count; j += kPartColumns) {
    int64_t const count = std::min(kPartColumns, cols.count - j);
    F const part =
        activate_row_gradient(x.activation, score, g + j, gate + j, up + j, a + j, count);
    if (parts != nullptr) parts[row * score_parts(s) + (cols.first + j) / kPartColumns] = part;
  }

  T* const dh = rows_of<T>(x.dh, width).row(row);
  store(gate, at(dh, 0), halves[0].stride, cols.count);
  if (gated) store(up, at(dh, 1), halves[1].stride, cols.count);
  if (x.a_scaled.data != nullptr) {
    store(a, rows_of<T>(x.a_scaled, s.intermediate).row(row) + cols.first, 1, cols.count);
  }
}

template <class T>
void gradient_block(DownGradient const& x, Block const& block, Span cols) {
  using F = Compute<T>;
  Scratch scratch;
  int64_t const inner = x.sizes.hidden, count = block.rows.count;
  auto const in = rows_of<T>(x.dout, inner);
  auto const rows = gather(scratch, in.data, in.stride, x.routing.row_token, x.sizes.tokens,
                           block.rows.first, count, inner);
  auto const weights = matrix_of<T>(x.w_down, block.expert).from(0, cols.first);
  F* const g = scratch.take<F>(count * cols.count);
  multiply(rows, operand(scratch, weights, inner, cols.count), g, count, cols.count, inner);
  add_low_rank<T>(g, x.low_rank.t, x.low_rank.b, x.low_rank.rank, block, cols, scratch);
  F* const row_scratch = scratch.take<F>(3 * cols.count);
  for (int64_t i = 0; i < count; ++i) {
    finish_row<T>(x, block.rows.first + i, cols, g + i * cols.count, row_scratch);
  }
}

// db1 of dH as it is stored, db2 of s * dO.
void sum_bias_gradients(DownGradient const& x) {
  Sizes const& s = x.sizes;
  auto const sum = [&](int64_t width, Routing const& routing, ConstRows m, Rows db) {
    if (db.data == nullptr) return;
    bias_gradient({.rows = s.rows(),
                   .width = width,
                   .experts = s.experts,
                   .dtype = x.dtype,
                   .db_dtype = x.db_dtype,
                   .accumulate = x.accumulate,
                   .routing = routing,
                   .m = m,
                   .db = db,
                   .tokens = s.tokens});
  };
  sum(s.intermediate * (x.activation.gated ? 2 : 1), {.offsets = x.routing.offsets}, x.dh, x.db_up);
  sum(s.hidden, x.routing, x.dout, x.db_down);
}

}  // namespace

void down_gradient(DownGradient const& x) {
  require_processor();
  check(x);
  auto const blocks = row_blocks(expert_groups(x.routing.offsets, x.sizes.experts, x.sizes.rows()));
  with_element(x.dtype, [&]<class T>() {
    parallel_pairs(blocks, spans(x.sizes.intermediate, kBlockColumns), product_work(x.sizes),
                   [&](Block const& block, Span cols) { gradient_block<T>(x, block, cols); });
  });
  sum_bias_gradients(x);
}

}  // namespace guild::cpu
