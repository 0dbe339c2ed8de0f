// Tensor maps for weights in the few-token kernels: one box fills a whole stage or a part of it.
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
// As streamed_map() in tensor_map.h, for data that is read once.
CUtensorMap stage_map(void const* data, DType dtype, StageShape const& shape, char const* name);

// Matrices of one part, viewed as (experts, rows / 8, steps, 8, 64): in a box, all steps of eight
// rows precede those of the next eight. rows and box_rows are multiples of 8.
struct GroupShape {
  int64_t rows, steps, experts, row_stride, expert_stride;
  int box_rows, box_steps;
};
CUtensorMap group_map(void const* data, DType dtype, GroupShape const& shape, char const* name);

// Matrices viewed as (experts, rows / 8, parts, 8, k), contiguous along the last dimension. In a
// box, 64 deep, groups of eight rows of one part alternate with those of the other. rows, of one
// part, and box_rows, of all parts, are multiples of 8.
struct EightsShape {
  int64_t k, rows, parts, experts, row_stride, part_stride, eight_stride, expert_stride;
  int box_rows;
};
CUtensorMap eights_map(void const* data, DType dtype, EightsShape const& shape, char const* name);

}  // namespace guild::cuda
