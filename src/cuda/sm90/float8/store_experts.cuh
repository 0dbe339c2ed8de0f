// Epilogues of the chunks' product that store all of a tile at once: its sums leave no registers
// for stores deferred to the next tile.
#pragma once
#include "cuda/sm90/epilogues.cuh"

namespace guild::cuda {

// StoreExpert, without deferred stores.
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

}  // namespace guild::cuda
