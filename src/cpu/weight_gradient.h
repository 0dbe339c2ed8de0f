// The product behind both weight gradients: for each expert, L[rows]^T R[rows], summed over its
// rows.
#pragma once
#include "cpu/views.h"

namespace guild::cpu {

// One operand of the product. Its rows are gathered from `tokens` rows if row_token is given. Its
// columns are those of the output, column j at [first + j * stride].
template <class T>
struct RowSource {
  TypedRows<T const> rows;
  int32_t const* row_token;
  Half half;
  int64_t tokens = 0;

  // Rows x cols of it, as multiply() takes them.
  View<Compute<T>> block(Scratch& scratch, Span r, Span cols) const {
    T const* const first = rows.data + half.first + cols.first * half.stride;
    if (row_token != nullptr) {  // gathered rows are never split in halves
      return gather(scratch, first, rows.stride, row_token, tokens, r.first, r.count, cols.count);
    }
    return operand(scratch, View<T>{first + r.first * rows.stride, rows.stride, half.stride},
                   r.count, cols.count);
  }
};

// dw[e](out, in) = sum over rows r of e of left[r, out] * right[r, in], or += where added; an
// expert without rows gets zeros, or is left alone.
template <class T, class D>
void weight_gradient_block(RowSource<T> const& left, RowSource<T> const& right, Block const& expert,
                           Span outs, Span ins, Weight const& dw, bool add) {
  using F = Compute<T>;
  if (expert.rows.count == 0 && add) return;
  Scratch scratch;
  F* const c = scratch.take<F>(outs.count * ins.count);
  std::fill_n(c, outs.count * ins.count, F(0));
  auto const kept = scratch.position();
  for (Span const& part : spans(expert.rows.count, kBlockInner)) {
    scratch.rewind(kept);
    Span const rows{expert.rows.first + part.first, part.count};
    auto const l = left.block(scratch, rows, outs);
    auto const r = right.block(scratch, rows, ins);
    multiply(l.transposed(), r, c, outs.count, ins.count, rows.count, part.first > 0);
  }
  D* const out = static_cast<D*>(dw.data) + start_of(expert.expert, dw.expert_stride, dw.expert_at);
  store_block(c, outs, ins, out, dw.out_stride, dw.in_stride, add, scratch);
}

// The same for all experts and blocks, in parallel.
template <class T, class D>
void weight_gradient(RowSource<T> const& left, RowSource<T> const& right,
                     std::vector<Block> const& experts, int64_t outs, int64_t ins, Weight const& dw,
                     bool add) {
  std::vector<std::pair<Span, Span>> tiles;
  for (Span const& o : spans(outs, kBlockRows)) {
    for (Span const& i : spans(ins, kBlockColumns)) tiles.emplace_back(o, i);
  }
  int64_t const rows = experts.back().rows.first + experts.back().rows.count;
  parallel_pairs(experts, tiles, double(rows) * double(outs * ins),
                 [&](Block const& expert, auto const& tile) {
                   weight_gradient_block<T, D>(left, right, expert, tile.first, tile.second, dw,
                                               add);
                 });
}

}  // namespace guild::cpu
