// StoreRows and StoreExpert (epilogues.cuh) without deferred stores: products of codes need those
// registers for their sums.
#pragma once
#include "cuda/sm90/epilogues.cuh"

namespace guild::cuda {

template <class T, template <class> class Stored>
struct StoreAtOnce {
  Stored<T> stored;

  using Storage = StoreBoxes;
  template <int n>
  struct Parcel {
    static constexpr int kMostSteps = 0;

    __device__ bool left() const { return false; }
    __device__ void begin(StoreAtOnce const& e, float const (&acc)[n / 2], StoreBoxes& boxes,
                          Tile const& tile, int thread) {
      put<0>(e, acc, boxes, tile, thread);
      if (n > 128 && tile.col + 128 < e.stored.width()) put<1>(e, acc, boxes, tile, thread);
    }
    __device__ void step(StoreAtOnce const&, StoreBoxes&, int) {}

   private:
    template <int half>
    static __device__ void put(StoreAtOnce const& e, float const (&acc)[n / 2], StoreBoxes& boxes,
                               Tile const& tile, int thread) {
      HalfWords word;
#pragma unroll
      for (int i = 0; i < 2; ++i) pack_box<T>(word[i], acc + 64 * half + 32 * i);
      e.stored.template put<n>(word, half, boxes, tile, thread);
    }
  };

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    if constexpr (LoadsBias<Stored<T>, n>) {
      return stored.bias.template start<n>(acc, tile, stored.width(), thread);
    }
    return false;
  }
};

}  // namespace guild::cuda
