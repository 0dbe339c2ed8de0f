// Y = A W2^T + b2
#include "checks/check.h"
#include "cpu/low_rank.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

template <class T>
void down_block(DownProjection const& x, Block const& block, Span cols) {
  using F = Compute<T>;
  Scratch scratch;
  int64_t const inner = x.sizes.intermediate, count = block.rows.count;
  auto const in = rows_of<T>(x.a, inner);
  auto const rows = gather(scratch, in.data, in.stride, nullptr, 0, block.rows.first, count, inner);
  auto const weights = matrix_of<T>(x.w_down, block.expert).from(cols.first, 0);
  F* const y = scratch.take<F>(count * cols.count);
  multiply(rows, operand(scratch, weights, cols.count, inner).transposed(), y, count, cols.count,
           inner);
  add_low_rank<T>(y, x.low_rank.t, x.low_rank.b, x.low_rank.rank, block, cols, scratch);

  F* const bias = scratch.take<F>(cols.count);
  if (x.bias.data != nullptr) {
    T const* const b = rows_of<T>(x.bias, x.sizes.hidden).row(block.expert);
    load(b + cols.first, 1, bias, cols.count);
  }
  auto const out = rows_of<T>(x.y, x.sizes.hidden);
  for (int64_t i = 0; i < count; ++i) {
    F* const row = y + i * cols.count;
    if (x.bias.data != nullptr) {
      for (int64_t j = 0; j < cols.count; ++j) row[j] += bias[j];
    }
    store(row, out.row(block.rows.first + i) + cols.first, 1, cols.count);
  }
}

}  // namespace

void down_projection(DownProjection const& x) {
  require_processor();
  check(x);
  auto const blocks = row_blocks(expert_groups(x.routing.offsets, x.sizes.experts, x.sizes.rows()));
  with_element(x.dtype, [&]<class T>() {
    parallel_pairs(blocks, spans(x.sizes.hidden, kBlockColumns), product_work(x.sizes),
                   [&](Block const& block, Span cols) { down_block<T>(x, block, cols); });
  });
}

}  // namespace guild::cpu
