// H = X[row_token] W1^T + b1;  A = activation(H)
#include "checks/check.h"
#include "cpu/activate.h"
#include "cpu/low_rank.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

// One half of H for a block: rows times the half's weights, plus its bias.
template <class T>
Compute<T>* half_product(UpProjection const& x, View<Compute<T>> rows, ConstWeight const& w,
                         ConstWeight const& low_rank, Half half, Block const& block, Span cols,
                         Scratch& scratch) {
  using F = Compute<T>;
  int64_t const inner = x.sizes.hidden, count = block.rows.count;
  F* const out = scratch.take<F>(count * cols.count);
  auto const weights = matrix_of<T>(w, block.expert).from(cols.first, 0);
  multiply(rows, operand(scratch, weights, cols.count, inner).transposed(), out, count, cols.count,
           inner);
  add_low_rank<T>(out, x.low_rank.t, low_rank, x.low_rank.rank, block, cols, scratch);
  if (x.bias.data == nullptr) return out;
  int64_t const width = x.sizes.intermediate * (x.activation.gated ? 2 : 1);
  T const* const bias = rows_of<T>(x.bias, width).row(block.expert);
  F* const b = scratch.take<F>(cols.count);
  load(bias + half.first + cols.first * half.stride, half.stride, b, cols.count);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < cols.count; ++j) out[i * cols.count + j] += b[j];
  }
  return out;
}

template <class T>
void up_block(UpProjection const& x, Block const& block, Span cols) {
  using F = Compute<T>;
  Scratch scratch;
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  auto const in = rows_of<T>(x.x, s.hidden);
  auto const rows = gather(scratch, in.data, in.stride, x.routing.row_token, x.sizes.tokens,
                           block.rows.first, block.rows.count, s.hidden);
  Half const halves[] = {gate_half(x.order, gated), up_half(x.order, s.intermediate)};
  F* const gate =
      half_product<T>(x, rows, x.w_up.gate, x.low_rank.b.gate, halves[0], block, cols, scratch);
  F* const up =
      gated ? half_product<T>(x, rows, x.w_up.up, x.low_rank.b.up, halves[1], block, cols, scratch)
            : nullptr;

  F* const a = scratch.take<F>(cols.count);
  int64_t const h_rows = x.h_rows < 0 ? s.rows() : x.h_rows;
  auto const h_out = rows_of<T>(x.h, s.intermediate * (gated ? 2 : 1));
  auto const a_out = rows_of<T>(x.a, s.intermediate);
  for (int64_t i = 0; i < block.rows.count; ++i) {
    int64_t const row = block.rows.first + i, at = i * cols.count;
    if (h_out.data != nullptr && row < h_rows) {
      for (int half = 0; half < (gated ? 2 : 1); ++half) {
        Half const to = halves[half];
        store((half == 0 ? gate : up) + at, h_out.row(row) + to.first + cols.first * to.stride,
              to.stride, cols.count);
      }
    }
    activate_row(x.activation, gate + at, gated ? up + at : nullptr, a, cols.count);
    store(a, a_out.row(row) + cols.first, 1, cols.count);
  }
}

}  // namespace

void up_projection(UpProjection const& x) {
  require_processor();
  check(x);
  auto const blocks = row_blocks(expert_groups(x.routing.offsets, x.sizes.experts, x.sizes.rows()));
  with_element(x.dtype, [&]<class T>() {
    parallel_pairs(blocks, spans(x.sizes.intermediate, kBlockColumns), product_work(x.sizes),
                   [&](Block const& block, Span cols) { up_block<T>(x, block, cols); });
  });
}

}  // namespace guild::cpu
