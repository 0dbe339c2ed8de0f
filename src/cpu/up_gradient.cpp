// dX~ = dH W1, by row
#include "checks/check.h"
#include "cpu/low_rank.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

template <class T>
void gradient_block(UpGradient const& x, Block const& block, Span cols) {
  using F = Compute<T>;
  Scratch scratch;
  int64_t const inner = x.sizes.intermediate, count = block.rows.count;
  auto const dh = rows_of<T>(x.dh, inner * (x.gated ? 2 : 1));
  F* const dx = scratch.take<F>(count * cols.count);
  auto const add_half = [&](ConstWeight const& w, Half half, bool add) {
    View<T> const rows{dh.row(block.rows.first) + half.first, dh.stride, half.stride};
    auto const weights = matrix_of<T>(w, block.expert).from(0, cols.first);
    multiply(operand(scratch, rows, count, inner), operand(scratch, weights, inner, cols.count), dx,
             count, cols.count, inner, add);
  };
  add_half(x.w_up.gate, gate_half(x.order, x.gated), false);
  if (x.gated) add_half(x.w_up.up, up_half(x.order, inner), true);
  add_low_rank<T>(dx, x.low_rank.t, x.low_rank.b, x.low_rank.rank, block, cols, scratch);
  auto const out = rows_of<T>(x.dx, x.sizes.hidden);
  store_block(dx, block.rows, cols, out.data, out.stride, 1, false, scratch);
}

}  // namespace

void up_gradient(UpGradient const& x) {
  require_processor();
  check(x);
  auto const blocks = row_blocks(expert_groups(x.routing.offsets, x.sizes.experts, x.sizes.rows()));
  with_element(x.dtype, [&]<class T>() {
    parallel_pairs(blocks, spans(x.sizes.hidden, kBlockColumns), product_work(x.sizes),
                   [&](Block const& block, Span cols) { gradient_block<T>(x, block, cols); });
  });
}

}  // namespace guild::cpu
