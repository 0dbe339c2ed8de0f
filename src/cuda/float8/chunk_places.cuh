// The rows that a thread block transposes: the chunk of its slot.
#pragma once
#include "guild/float8_chunks.h"
#include "shared/tiles.h"

namespace guild::cuda {

// The rows of a slot's chunk; count is 0 where it has none.
struct ChunkRows {
  int first, count;
};

// Called by all threads of the block, `rows` in shared memory. Groups' slots rise with their
// number, so at most one thread finds its own.
__device__ inline void find_chunk(Groups const& groups, int slot, ChunkRows& rows) {
  if (threadIdx.x == 0) rows.count = 0;
  __syncthreads();
  for (int group = threadIdx.x; group < groups.groups; group += blockDim.x) {
    int const begin = groups.start(group), end = groups.end(group, begin);
    int const chunk = slot - (begin / int(kScaleBlock) + group);
    if (chunk < 0 || chunk > (end - begin - 1) / int(kScaleBlock) || begin == end) continue;
    rows.first = begin + chunk * int(kScaleBlock);
    rows.count = min(end - rows.first, int(kScaleBlock));
  }
  __syncthreads();
}

// Where row `index` of the chunk is in x; -1: it is zeros.
__device__ inline int source_row(ChunkRows const& rows, int index, int32_t const* row_token,
                                 int tokens) {
  if (index >= rows.count) return -1;
  int const row = rows.first + index;
  if (row_token == nullptr) return row;
  int const token = row_token[row];
  return unsigned(token) < unsigned(tokens) ? token : -1;
}

// What both kernels read and write.
struct ChunkArgs {
  Groups groups;
  void const* x;
  int64_t x_stride;
  float const* x_scales;
  int64_t x_scale_row_stride, x_scale_column_stride;
  int32_t const* row_token;
  int tokens;
  int columns, halves, blocks;  // of a half: columns, blocks of them
  uint8_t* codes;
  float* scales;
  int64_t scale_slot_stride, scale_column_stride;

  // Where the slot's chunk has column `column`, counted over all halves.
  __device__ uint8_t* place(int slot, int64_t column) const {
    return codes + (slot * (int64_t(halves) * columns) + column) * kScaleBlock;
  }
};

}  // namespace guild::cuda
