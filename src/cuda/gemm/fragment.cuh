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
  static constexpr int kBoxes = 2;
  alignas(1024) char box[kBoxes][kBlockBytes];
};

// The boxes in turn, and those that a tile's last stages of the sum lend until its stores have read
// them. Every box is stored by a group of its own, in order.
struct StoreRing {
  StoreBoxes& own;
  char *first_lent = nullptr, *second_lent = nullptr;
  int boxes = StoreBoxes::kBoxes;  // own and lent
  int next = 0;
  bool fresh = false;  // no box is taken twice since begin()
  __device__ explicit StoreRing(StoreBoxes& own) : own(own) {}

  // Begins a tile, to which `count` boxes are lent: all are free.
  __device__ void begin(int count, char* first, char* second, int thread) {
    boxes = StoreBoxes::kBoxes + count;
    first_lent = first;
    second_lent = second;
    next = 0;
    fresh = true;
    if (thread == 0) tma_store_wait<0>();
    warpgroup_barrier();
  }

  // Every thread of the warpgroup may write the next `count` boxes: what they held has left.
  template <int count>
  __device__ void acquire(int thread) {
    static_assert(count <= StoreBoxes::kBoxes);
    next += count;
    fresh = fresh && next <= boxes;
    if (next >= boxes && !fresh) next -= boxes;
    if (fresh) return;
    if (thread == 0) {
      if (boxes == 4) {
        tma_store_wait<4 - count>();
      } else {
        tma_store_wait<StoreBoxes::kBoxes - count>();
      }
    }
    warpgroup_barrier();
  }
  // The i-th of the `count` boxes acquired last.
  template <int count>
  __device__ char* box(int i) const {
    int const from = next - count + i, at = from < 0 ? from + boxes : from;
    char* const lent = at == StoreBoxes::kBoxes ? first_lent : second_lent;
    return at < StoreBoxes::kBoxes ? own.box[at] : lent;
  }
};

// Rows of a matrix that boxes of 64 x 64 are stored to, clipped to the rows that are the tile's own
// and to the columns that exist. The map sees element (x, half, r, row) at row r + row - 64: a box
// whose valid rows are its last before r = 64 leaves the others out of bounds.
template <class T>
struct RowOutput {
  CUtensorMap map;  // (columns, halves, 64, rows + 64), boxes of 64 x 1 x 64 x 1
  bool present;
  int columns;  // of one half
};

// The box of rows row .. row + valid - 1, columns col .. col + 63 of `half`.
__device__ inline RowCoordinate clipped_box(int col, int half, int row, int valid) {
  return {col, half, 64 - valid, row + valid};
}

// Stores boxes through the ring: fill(i, address) writes the i-th, store(i, box) issues its store.
template <int count, class Fill, class Store>
__device__ inline void store_boxes(StoreRing& ring, int thread, Fill&& fill, Store&& store) {
  ring.acquire<count>(thread);
  char* box[count];
#pragma unroll
  for (int i = 0; i < count; ++i) fill(i, shared_address(box[i] = ring.box<count>(i)));
  fence_async_proxy();
  warpgroup_barrier();
  if (thread != 0) return;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    store(i, box[i]);
    tma_store_commit();
  }
}

// Stores 64 columns of a fragment, those from `col`, through the ring.
template <class T>
__device__ inline void store_rows(RowOutput<T> const& out, StoreRing& ring, float const* value,
                                  Tile const& tile, int col, int half, int thread) {
  store_boxes<1>(
      ring, thread, [&](int, uint32_t box) { fragment_to_box<T>(box, value, thread); },
      [&](int, char* box) {
        tma_store(out.map, box, clipped_box(col, half, tile.row, tile.rows));
      });
}

}  // namespace guild::cuda
