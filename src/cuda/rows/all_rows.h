// The offsets of a single expert that has all rows, as for shared experts.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda {

struct AllRows {
  int64_t rows;
  int32_t* offsets;  // (2) out: 0, rows
};
void all_rows(AllRows const& args, Queue queue);

}  // namespace guild::cuda
