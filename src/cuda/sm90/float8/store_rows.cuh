// D = A B^T + bias, by row: StoreRows of epilogues.cuh without a rest that waits for the next tile,
// whose registers are the waves' here.
//
// Half of a tile goes through the boxes and TMA. The other half would have to wait until TMA has
// read them; it is stored from registers instead, in pieces of 64 bytes.
#pragma once
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/float8/warp_rows.cuh"

namespace guild::cuda {

// Four words of four threads side by side, exchanged so that thread q has all words q.
__device__ inline void turn_quad(uint32_t (&word)[4], int thread) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    bool const second = (thread & step) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const low = step == 1 ? 2 * i : i, high = low + step;
      uint32_t const other = __shfl_xor_sync(~0u, second ? word[low] : word[high], step);
      (second ? word[low] : word[high]) = other;
    }
  }
}

template <class T>
struct StoreRowsAtOnce {
  StoreRows<T> rows;
  ByteRows direct;  // the same matrix

  using Storage = StoreBoxes;
  template <int n>
  struct Parcel {
    static constexpr int kMostSteps = 0;

    __device__ bool left() const { return false; }
    __device__ void begin(StoreRowsAtOnce const& e, float const (&acc)[n / 2], StoreBoxes& boxes,
                          Tile const& tile, int thread) {
      HalfWords word;
#pragma unroll
      for (int i = 0; i < 2; ++i) pack_box<T>(word[i], acc + 32 * i);
      e.rows.template put<n>(word, 0, boxes, tile, thread);
      if (n > 128) e.store_direct(acc + 64, tile, tile.col + 128, thread);
    }
    __device__ void step(StoreRowsAtOnce const&, StoreBoxes&, int) {}
  };

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    return rows.template start<n>(acc, tile, thread);
  }

 private:
  // 128 columns from `col` on. Of 32 columns of a row a thread has four times two neighbours, and
  // stores eight.
  __device__ void store_direct(float const* value, Tile const& tile, int col, int thread) const {
    int const row = fragment_row(thread), column = col + thread % 4 * 8;
    char* const to = direct.data + (tile.row + row) * direct.stride + column * int(sizeof(T));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float const* const v = value + 4 * (4 * i + j) + 2 * below;
          word[j] = pack<T>(v[0], v[1]);
        }
        turn_quad(word, thread);
        if (row + 8 * below < tile.rows && column + 32 * i < rows.d.columns) {
          *reinterpret_cast<uint4*>(to + 8 * below * direct.stride + 32 * i * int(sizeof(T))) = {
              word[0], word[1], word[2], word[3]};
        }
      }
    }
  }
};

}  // namespace guild::cuda
