// Tensor maps of weights of which a kernel for few tokens loads a whole stage at a time.
#pragma once
#include <cuda.h>

#include "guild/types.h"

namespace guild::cuda {

// Matrices (experts, rows, 64 steps), contiguous along the last dimension, of one part or of two,
// which lie side by side in a box. Strides in elements.
struct StageShape {
  int64_t rows, parts, steps, experts, row_stride, part_stride, expert_stride;
  int box_rows, box_steps;  // a box has all parts
};
// For what is read once, as streamed_map() of tensor_map.h.
CUtensorMap stage_map(void const* data, DType dtype, StageShape const& shape, char const* name);

// Matrices of one part as (experts, rows / 8, steps, 8, 64): in a box, the steps of eight rows
// follow each other. rows and box_rows are multiples of 8.
struct GroupShape {
  int64_t rows, steps, experts, row_stride, expert_stride;
  int box_rows, box_steps;
};
CUtensorMap group_map(void const* data, DType dtype, GroupShape const& shape, char const* name);

// Matrices as (experts, rows / 8, parts, 8, k), contiguous along the last dimension: in a box, 64
// deep, eights of rows of one part and of the other alternate. rows, of a part, and box_rows, of
// all parts, are multiples of 8.
struct EightsShape {
  int64_t k, rows, parts, experts, row_stride, part_stride, eight_stride, expert_stride;
  int box_rows;
};
CUtensorMap eights_map(void const* data, DType dtype, EightsShape const& shape, char const* name);

}  // namespace guild::cuda
