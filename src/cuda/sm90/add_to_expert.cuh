// D[e] += A^T B, one matrix per expert, in float32 or 16 bits: a ReadingEpilogue.
//
// D arrives through the ring of stages while the sums are computed, 64 columns of the tile per
// stage. The results overwrite it there and are stored by TMA.
#pragma once
#include "cuda/arch/cluster.cuh"
#include "cuda/sm90/column_sums.cuh"
#include "cuda/sm90/fragment.cuh"
#include "shared/gemm_config.h"
#include "shared/tiles.h"

namespace guild::cuda {

// V: of D's elements, float or a 16-bit type.
template <class V>
struct AddToExpert {
  CUtensorMap map;  // (columns, rows, E), or (rows, columns, E) where transposed, in boxes of
                    // kBoxWidth x 64 x 1
  bool transposed;  // rows of D are contiguous in memory, not columns
  int rows, columns;
  int32_t const* expert_at;  // the map's third coordinate; null: the expert itself

  static constexpr int kCopies = 1;
  static constexpr int kBoxWidth = kRowBytes / int(sizeof(V));
  static constexpr int kBoxes = 64 / kBoxWidth;      // of 64 x 64 elements
  static constexpr int kBoxBytes = 2 * kBlockBytes;  // the same box of both consumers
  static constexpr int kUnits = kScoreColumns / 64;  // of a tile
  static constexpr bool kIsFloat = sizeof(V) == 4;

  struct Storage {};
  struct State {};

  // Blocks that split a tile by columns all return the first block's number, so that their rings
  // stay in step. A group without rows adds nothing.
  __device__ int units(Tile const& tile) const {
    if (tile.inner == 0) return 0;
    int const first = tile.apart ? tile.col - cluster_rank() * kScoreColumns : tile.col;
    return min((columns - first + 63) / 64, kUnits);
  }

  __device__ void load(Tile const& tile, int unit, char* to, Barrier& full) const {
    auto const for_boxes = [&](auto&& f) {
#pragma unroll 1
      for (int row = 0; row < tile.rows; row += 64) {
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
          Coordinate const at = place(tile, row, unit, i);
          if (exists(at)) f(at, to + i * kBoxBytes + row / 64 * kBlockBytes);
        }
      }
    };
    int bytes = 0;
    for_boxes([&](Coordinate, char*) { bytes += kBlockBytes; });
    full.arrive_expect(bytes);
    for_boxes([&](Coordinate at, char* box) { tma_load(map, box, at, full); });
  }

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    static_assert(n == kScoreColumns);
    return false;
  }
  __device__ void prepare(Storage&, int) const {}
  __device__ void begin(State&, Tile const&, int) const {}
  __device__ bool wants_side_sums(Tile const&) const { return false; }
  __device__ NoSideSums side_sums(Storage&, Tile const&, int, int) const { return {}; }
  __device__ void finish(State const&, Tile const&, int) const {}

  __device__ void store_unit(float const* sums, char*, char* stage, State&, Tile const& part,
                             int unit, int thread, int storer, Storage&) const {
    if constexpr (kIsFloat) {
      transposed ? add_floats_transposed(sums, stage, thread) : add_floats(sums, stage, thread);
    } else {
      add_words(sums, shared_address(stage), thread);
    }
    fence_async_proxy();
    warpgroup_barrier();
    if (thread != storer) return;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      Coordinate const at = place(part, 0, unit, i);
      if (exists(at)) tma_store(map, stage + i * kBoxBytes, at);
    }
    tma_store_commit();
  }

 private:
  // Where box i of a unit lies, of the tile's rows from `row` on.
  __device__ Coordinate place(Tile const& tile, int row, int unit, int i) const {
    int const first = tile.row + row, col = tile.col + 64 * unit,
              e = placed(expert_at, tile.expert);
    if (transposed) return {first + kBoxWidth * i, col, e};
    return {col + kBoxWidth * i, first, e};
  }
  __device__ bool exists(Coordinate const& at) const {
    return at.x < (transposed ? rows : columns) && at.y < (transposed ? columns : rows);
  }

  // Rows of D as rows of the boxes. A thread's two neighbours are 8 consecutive bytes.
  __device__ void add_floats(float const* sums, char* stage, int thread) const {
    int const column = fragment_column(thread);
    uint32_t const first = chunk_address(0, fragment_row(thread), column / 4) + column % 4 * 4;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      int const block = i / 4, below = i % 4 / 2;
      auto& to = *reinterpret_cast<float2*>(stage + (first ^ (block % 4 * 32)) +
                                            block / 4 * kBoxBytes + below * 1024);
      to = {sums[i] + to.x, sums[i + 1] + to.y};
    }
  }

  // Columns of D as rows of the boxes.
  __device__ void add_floats_transposed(float const* sums, char* stage, int thread) const {
    int const row = fragment_row(thread), column = fragment_column(thread);
    char* const box = stage + row / 32 * kBoxBytes + row % 4 * 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      int const block = i / 4, below = i % 4 / 2;
      uint32_t const at = chunk_address(0, column + i % 2, row % 32 / 4 + 2 * below);
      *reinterpret_cast<float*>(box + at + block * 1024) += sums[i];
    }
  }

  // 16-bit elements, either way round.
  __device__ void add_words(float const* sums, uint32_t box, int thread) const {
    BoxWords word;
    transposed ? box_to_words_transposed(box, word, thread) : box_to_words(box, word, thread);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float2 const old = unpack<V>(word[i]);
      word[i] = pack<V>(sums[2 * i] + old.x, sums[2 * i + 1] + old.y);
    }
    transposed ? words_to_box_transposed(box, word, thread) : words_to_box(box, word, thread);
  }
};

}  // namespace guild::cuda
