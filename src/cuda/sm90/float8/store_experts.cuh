// Epilogues of the chunks' product that store all of a tile at once: its sums leave no registers
// for a rest that waits for the next tile.
#pragma once
#include "cuda/sm90/epilogues.cuh"

namespace guild::cuda {

// StoreExpert at once.
template <class T>
struct StoreExpertAtOnce {
  StoreExpert<T> experts;

  using Storage = StoreBoxes;
  template <int n>
  struct Parcel {
    static constexpr int kMostSteps = 0;

    __device__ bool left() const { return false; }
    __device__ void begin(StoreExpertAtOnce const& e, float const (&acc)[n / 2], StoreBoxes& boxes,
                          Tile const& tile, int thread) {
      if (tile.rows <= 0) return;
      put<0>(e, acc, boxes, tile, thread);
      if (n > 128 && tile.col + 128 < e.experts.width()) put<1>(e, acc, boxes, tile, thread);
    }
    __device__ void step(StoreExpertAtOnce const&, StoreBoxes&, int) {}

   private:
    template <int half>
    static __device__ void put(StoreExpertAtOnce const& e, float const (&acc)[n / 2],
                               StoreBoxes& boxes, Tile const& tile, int thread) {
      HalfWords word;
#pragma unroll
      for (int i = 0; i < 2; ++i) pack_box<T>(word[i], acc + 64 * half + 32 * i);
      e.experts.template put<n>(word, half, boxes, tile, thread);
    }
  };

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }
};

// One float32 matrix per group, columns contiguous and in pairs of 8 bytes. Where results are
// added, many are read before the first is written: a trip to memory each would take longer than
// the tile's sums.
struct StoreFloats {
  DirectOutput d;

  struct Storage {};
  template <int n>
  using Parcel = AllAtOnce<n, StoreFloats>;

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }
  template <int n>
  __device__ void store(float const (&acc)[n / 2], Tile const& tile, int thread) const {
    int const row = fragment_row(thread), column = tile.col + fragment_column(thread);
    float* const first = static_cast<float*>(d.data) +
                         placed(d.group_at, tile.expert) * d.group_stride +
                         (tile.row + row) * d.row_stride + column;
    constexpr int kPairs = 16;  // at a time
#pragma unroll
    for (int begin = 0; begin < n / 4; begin += kPairs) {
      float2 sum[kPairs];
      auto const exists = [&](int i) {
        return row + i % 2 * 8 < tile.rows && column + i / 2 * 8 < d.columns;
      };
      auto const place = [&](int i) {
        return reinterpret_cast<float2*>(first + i % 2 * 8 * d.row_stride + i / 2 * 8);
      };
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        bool const reads = d.accumulate && exists(begin + i);
        sum[i] = reads ? *place(begin + i) : float2{0, 0};
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float const* const value = acc + 2 * (begin + i);
        if (exists(begin + i)) *place(begin + i) = {value[0] + sum[i].x, value[1] + sum[i].y};
      }
    }
  }
};

}  // namespace guild::cuda
