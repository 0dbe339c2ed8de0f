// Zeros for the rows of a result that belong to no group.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda {

// Rows 0 .. *first and *last .. rows of d, n elements of element_bytes (2 or 4) each; strides in
// elements.
struct UngroupedRows {
  void* d;
  int64_t row_stride, col_stride;
  int32_t const* last;  // where the last group ends, on the device
  int64_t rows, n;
  int element_bytes;
  int32_t const* first = nullptr;  // where the first group begins; null: 0
};
void clear_ungrouped_rows(UngroupedRows const& x, Queue const& queue);

}  // namespace guild::cuda
