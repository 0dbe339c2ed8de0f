// A tile of fp32 accumulators in registers, and its way through shared memory.
//
// A warpgroup holds 64 rows x n columns: thread t has row 16 * (t / 32) + t % 32 / 4 and the row 8
// below it, and in each block of 8 columns the two from 2 * (t % 4): value[4 * block + 2 * below +
// i]. On its way to global memory it passes through boxes of 64 x 64 elements, 128-byte swizzled,
// which TMA writes. Source of the layout: PTX ISA, "wgmma", register fragments for m64nNk16.
#pragma once
#include "../arch/copy.cuh"
#include "../arch/wgmma.cuh"
#include "shared/tiles.h"

namespace guild::cuda {

template <class T>
__device__ inline uint32_t pack(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    auto const v = __floats2half2_rn(x, y);
    return reinterpret_cast<uint32_t const&>(v);
  } else {
    auto const v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<uint32_t const&>(v);
  }
}

template <class T>
__device__ inline float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<__half2 const&>(word));
  } else {
    return __bfloat1622float2(reinterpret_cast<__nv_bfloat162 const&>(word));
  }
}

template <class T>
__device__ inline float to_float(T x) {
  return float(x);
}

__device__ inline int fragment_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
__device__ inline int fragment_column(int thread) { return thread % 4 * 2; }

// The barrier of one warpgroup of consumers; id 0 is left to __syncthreads().
__device__ inline void warpgroup_barrier() { named_barrier(1 + threadIdx.x / 128, 128); }

// Writes 64 columns of a fragment to a box, rows of D as rows of the box.
template <class T>
__device__ inline void fragment_to_box(uint32_t box, float const* value, int thread) {
  uint32_t const first = chunk_address(box, thread / 32 * 16 + thread % 16, thread % 32 / 16);
#pragma unroll
  for (int block = 0; block < 8; block += 2) {
    float const* v = value + block * 4;
    store_matrices(first ^ (16 * block), pack<T>(v[0], v[1]), pack<T>(v[2], v[3]),
                   pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
  }
}

// The same with columns of D as rows of the box.
template <class T>
__device__ inline void fragment_to_box_transposed(uint32_t box, float const* value, int thread) {
  int const chunk = thread / 32 * 2 + thread % 16 / 8;
#pragma unroll
  for (int block = 0; block < 8; block += 2) {
    float const* v = value + block * 4;
    int const row = 8 * (block + thread % 32 / 16) + thread % 8;
    store_matrices_transposed(chunk_address(box, row, chunk), pack<T>(v[0], v[1]),
                              pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
  }
}

// One warpgroup's staging boxes.
struct StoreBoxes {
  alignas(1024) char box[2][kBlockBytes];
};

// Pairs of boxes in turn: its own and, where the tile's last stages of the sum lend it, another,
// until its stores have read it. Every pair is stored as a group of its own.
class StoreRing {
 public:
  __device__ explicit StoreRing(StoreBoxes& own) : own(own) {}

  // Begins a tile: what was stored before has left. first, second: the boxes lent; null: none.
  __device__ void begin(char* first, char* second, int thread) {
    lent[0] = first;
    lent[1] = second;
    used = 0;
    if (thread == 0) tma_store_wait<0>();
    warpgroup_barrier();
  }

  // Stores one or two boxes: fill(i, address) writes the i-th, store(i, box) issues its store.
  template <int count, class Fill, class Store>
  __device__ void store(int thread, Fill&& fill, Store&& store) {
    static_assert(count == 1 || count == 2);
    bool const two = lent[0] != nullptr;
    if (used >= (two ? 2 : 1)) {
      if (thread == 0) two ? tma_store_wait<1>() : tma_store_wait<0>();
      warpgroup_barrier();
    }
    bool const second = two && used % 2 != 0;
    ++used;
    char* box[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      box[i] = second ? lent[i] : own.box[i];
      fill(i, shared_address(box[i]));
    }
    fence_async_proxy();
    warpgroup_barrier();
    if (thread != 0) return;
#pragma unroll
    for (int i = 0; i < count; ++i) store(i, box[i]);
    tma_store_commit();
  }

 private:
  StoreBoxes& own;
  char* lent[2] = {nullptr, nullptr};
  int used = 0;  // pairs since begin()
};

// Rows of a matrix that boxes of 64 x 64 are stored to, clipped to the rows that are the tile's own
// and to the columns that exist. The map sees element (x, half, r, row) at row r + row - 64: a box
// whose valid rows are its last before r = 64 leaves the others out of bounds.
template <class T>
struct RowOutput {
  CUtensorMap map;  // (columns, halves, 64, rows + 64), boxes of 64 x 1 x 64 x 1
  bool present;
  int columns;  // of one half

  // Stores the tile's rows of a box: columns from `col` of `half`.
  __device__ void store(char const* box, Tile const& tile, int col, int half) const {
    tma_store(map, box, RowCoordinate{col, half, 64 - tile.rows, tile.row + tile.rows});
  }
};

}  // namespace guild::cuda
