// The low-rank term of a product's block: C += T B^T.
#pragma once
#include "cpu/views.h"

namespace guild::cpu {

// c (rows of the block x cols), packed; b: the term's matrix whose outputs are the columns.
template <class T>
void add_low_rank(Compute<T>* c, ConstRows const& t, ConstWeight const& b, int64_t rank,
                  Block const& block, Span cols, Scratch& scratch) {
  if (rank == 0) return;
  auto const in = rows_of<T>(t, rank);
  int64_t const count = block.rows.count;
  auto const rows = gather(scratch, in.data, in.stride, nullptr, 0, block.rows.first, count, rank);
  auto const weights = matrix_of<T>(b, block.expert).from(cols.first, 0);
  multiply(rows, operand(scratch, weights, cols.count, rank).transposed(), c, count, cols.count,
           rank, true);
}

}  // namespace guild::cpu
