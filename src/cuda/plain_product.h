// The grouped product for operands that TMA cannot load: any strides and sizes, 64 x 64 tiles,
// without tensor cores, fp32 sums with k ascending.
#pragma once
#include "guild/cuda.h"
#include "shared/tiles.h"

namespace guild::cuda {

// D[group] = A[group] B[group] + bias. Groups split the rows, which are ragged or, if
// rows_per_group > 0, equally many, and A and D have a group stride; with sum_groups they split the
// inner dimension.
struct PlainProduct {
  DType dtype = DType::bfloat16, out_dtype = DType::bfloat16;
  bool accumulate = false, sum_groups = false;
  int rows = 0, n = 0, k = 0, rows_per_group = 0;
  Groups groups;
  GroupedGemm::Operand a, b, d;
  ConstRows bias;  // (E, n)
};
void plain_product(PlainProduct const& product, Queue const& queue);

}  // namespace guild::cuda
