// The register layout of fp32 accumulators, and their way through shared memory to global memory.
//
// A warpgroup holds 64 rows x n columns. Thread t has rows 16 * (t / 32) + t % 32 / 4 and 8 below
// it, and of each block of 8 columns the two from 2 * (t % 4) on: value[4 * block + 2 * below + i].
// Results are packed into boxes of 64 x 64 elements in shared memory, with the 128-byte swizzle,
// and stored by TMA. Source: PTX ISA, "wgmma", register fragments for m64nNk16.
#pragma once
#include "cuda/arch/copy.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/element.cuh"
#include "shared/tiles.h"

namespace guild::cuda {

__device__ inline int fragment_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
__device__ inline int fragment_column(int thread) { return thread % 4 * 2; }

// Named barrier of one consumer warpgroup. Id 0 is __syncthreads().
__device__ inline void warpgroup_barrier() { named_barrier(1 + threadIdx.x / 128, 128); }

// 64 columns of a fragment, packed: a word holds two neighbours of a row, word 2 * block + below.
using BoxWords = uint32_t[16];

template <class T>
__device__ inline void pack_box(BoxWords& word, float const* value) {
#pragma unroll
  for (int i = 0; i < 16; ++i) word[i] = pack<T>(value[2 * i], value[2 * i + 1]);
}

// A thread's stmatrix or ldmatrix address for columns 0 .. 15 of a box. XOR with 32 to get the next
// 16 columns.
__device__ inline uint32_t matrices_address(uint32_t box, int thread) {
  return chunk_address(box, thread / 32 * 16 + thread % 16, thread % 32 / 16);
}

// Calls f(address, words) for each group of four words of a 64-column fragment, with the thread's
// stmatrix or ldmatrix address. Rows of D are rows of the box.
template <class Words, class F>
__device__ inline void for_words_of_box(uint32_t box, Words& word, int thread, F&& f) {
  uint32_t const first = matrices_address(box, thread);
#pragma unroll
  for (int i = 0; i < 16; i += 4) f(first ^ (8 * i), word + i);
}
// The same with columns of D as rows of the box, for the transposed instructions.
template <class Words, class F>
__device__ inline void for_words_of_columns(uint32_t box, Words& word, int thread, F&& f) {
  int const chunk = thread / 32 * 2 + thread % 16 / 8;
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    f(chunk_address(box, 8 * (i / 2 + thread % 32 / 16) + thread % 8, chunk), word + i);
  }
}

// Writes 64 columns of a fragment to a box, or reads them.
__device__ inline void words_to_box(uint32_t box, BoxWords const& word, int thread) {
  for_words_of_box(box, word, thread, [](uint32_t at, uint32_t const* w) {
    store_matrices(at, w[0], w[1], w[2], w[3]);
  });
}
__device__ inline void box_to_words(uint32_t box, BoxWords& word, int thread) {
  for_words_of_box(box, word, thread,
                   [](uint32_t at, uint32_t* w) { load_matrices(at, w[0], w[1], w[2], w[3]); });
}
__device__ inline void words_to_box_transposed(uint32_t box, BoxWords const& word, int thread) {
  for_words_of_columns(box, word, thread, [](uint32_t at, uint32_t const* w) {
    store_matrices_transposed(at, w[0], w[1], w[2], w[3]);
  });
}
__device__ inline void box_to_words_transposed(uint32_t box, BoxWords& word, int thread) {
  for_words_of_columns(box, word, thread, [](uint32_t at, uint32_t* w) {
    load_matrices_transposed(at, w[0], w[1], w[2], w[3]);
  });
}

// Writes 64 columns of a fragment to a box.
template <class T>
__device__ inline void fragment_to_box(uint32_t box, float const* value, int thread) {
  BoxWords word;
  pack_box<T>(word, value);
  words_to_box(box, word, thread);
}

// Two boxes, 128 columns.
using HalfWords = BoxWords[2];

// One warpgroup's staging boxes.
struct StoreBoxes {
  alignas(1024) char box[2][kBlockBytes];

  __device__ uint32_t address(int i) const { return shared_address(box[i]); }

  // Waits until earlier stores have read the boxes.
  __device__ void wait(int thread) const {
    if (thread == 0) tma_store_wait<0>();
    warpgroup_barrier();
  }
  // Calls store() in one thread, which issues TMA stores of what the warpgroup has written.
  template <class Store>
  __device__ void send(int thread, Store&& store) const {
    fence_async_proxy();
    warpgroup_barrier();
    if (thread != 0) return;
    store();
    tma_store_commit();
  }
  // Packs and stores the first `count` boxes, 32 values per thread each. Rows of D are rows of a
  // box.
  template <class T, class Store>
  __device__ void put(float const (&value)[64], int count, int thread, Store&& store) const {
    wait(thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i < count) fragment_to_box<T>(address(i), value + 32 * i, thread);
    }
    send(thread, store);
  }
};

// A matrix to which 64 x 64 boxes are stored; TMA clips them to the tile's rows and the matrix's
// columns. To make it clip rows, the map has a row dimension twice: (x, half, r, row), with r < 64,
// is row r + row - 64 of the matrix. A box of n valid rows is stored at r = 64 - n, which puts its
// other rows out of bounds.
template <class T>
struct RowOutput {
  CUtensorMap map;  // (columns, halves, 64, rows + 64), boxes of 64 x 1 x 64 x 1
  bool present;
  int columns;  // of one half

  // Stores the tile's rows of a box: columns from `col` of `half`.
  __device__ void store(char const* box, Tile const& tile, int col, int half) const {
    tma_store(map, box, coordinate(tile, col, half));
  }
  __device__ void store(char const* box, Tile const& tile, int col, int half,
                        uint64_t policy) const {
    tma_store(map, box, coordinate(tile, col, half), policy);
  }

 private:
  static __device__ RowCoordinate coordinate(Tile const& tile, int col, int half) {
    return {col, half, 64 - tile.rows, tile.row + tile.rows};
  }
};

}  // namespace guild::cuda
