// One struct per fused output. An epilogue is a function from a tile of accumulators to memory.
//
// start() may fill the accumulators before the tile's products and says whether it has. store()
// runs after them. Where there is a Parcel in its place, begin() does a half of the tile, 64 rows a
// consumer, and keeps the other, which leaves beside the next tile's products: step() does the next
// piece of what is left. A piece should take less than a step of the sum, some 1,000 cycles.
//
// Storage is in shared memory, one a consumer warpgroup.
#pragma once
#include "cuda/sm90/outputs.cuh"
#include "shared/tiles.h"

namespace guild::cuda {

// A tile of n columns that leaves in two halves: the first at once, the second from registers.
// E::put(word, half, ...) brings a half to its boxes and sends them off.
template <class T, int n, class E>
class TwoHalves {
 public:
  __device__ bool left() const { return waiting; }

  __device__ void begin(E const& epilogue, float const (&acc)[n / 2], StoreBoxes& boxes,
                        Tile const& rows, int thread) {
    tile = rows;
    if (tile.rows <= 0) return;
    HalfWords first;
    pack_half(first, acc, 0);
    epilogue.template put<n>(first, 0, boxes, tile, thread);
    pack_half(word, acc, 1);
    waiting = n > 128 && tile.col + 128 < epilogue.width();
  }

  __device__ void step(E const& epilogue, StoreBoxes& boxes, int thread) {
    epilogue.template put<n>(word, 1, boxes, tile, thread);
    waiting = false;
  }

 private:
  static __device__ void pack_half(HalfWords& word, float const (&acc)[n / 2], int half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (64 * half + 32 * i < n / 2) pack_box<T>(word[i], acc + 64 * half + 32 * i);
    }
  }

  HalfWords word;
  Tile tile;
  bool waiting = false;
};

// D = A B^T + bias, by row.
template <class T>
struct StoreRows {
  RowOutput<T> d;
  Bias<T> bias;  // (E, columns)

  using Storage = StoreBoxes;
  template <int n>
  using Parcel = TwoHalves<T, n, StoreRows>;

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    return bias.template start<n>(acc, tile, d.columns, thread);
  }
  __device__ int width() const { return d.columns; }
  template <int n>
  __device__ void put(HalfWords const& word, int half, StoreBoxes const& boxes, Tile const& tile,
                      int thread) const {
    int const col = tile.col + 128 * half;
    boxes.wait(thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (128 * half + 64 * i < n) words_to_box(boxes.address(i), word[i], thread);
    }
    boxes.send(thread, [&] {
      d.store(boxes.box[0], tile, col, 0);
      if (128 * half + 64 < n && col + 64 < d.columns) d.store(boxes.box[1], tile, col + 64, 0);
    });
  }
};

// The same, or one matrix per expert, in float32, of odd strides, or added to what is there.
template <class T>
struct StoreDirect {
  DirectOutput d;
  Bias<T> bias;

  struct Storage {};

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    return bias.template start<n>(acc, tile, d.columns, thread);
  }
  template <int n>
  __device__ void store(float (&acc)[n / 2], Tile const& tile, int thread) const {
    store_direct<T, n>(d, acc, tile.expert, tile.row, tile.col, tile.rows, thread);
  }
};

// D[e] = A^T B, one matrix per expert, in either order.
template <class T>
struct StoreExpert {
  CUtensorMap map;  // (columns, rows, E), or (rows, columns, E) where transposed
  bool transposed;  // rows of D are contiguous in memory, not columns
  int columns;

  using Storage = StoreBoxes;
  template <int n>
  using Parcel = TwoHalves<T, n, StoreExpert>;

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }
  __device__ int width() const { return columns; }
  template <int n>
  __device__ void put(HalfWords const& word, int half, StoreBoxes const& boxes, Tile const& tile,
                      int thread) const {
    boxes.wait(thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (transposed) {
        words_to_box_transposed(boxes.address(i), word[i], thread);
      } else {
        words_to_box(boxes.address(i), word[i], thread);
      }
    }
    boxes.send(thread, [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const col = tile.col + 128 * half + 64 * i;
        int const x = transposed ? tile.row : col, y = transposed ? col : tile.row;
        if (col < columns) tma_store(map, boxes.box[i], Coordinate{x, y, tile.expert});
      }
    });
  }
};

}  // namespace guild::cuda
