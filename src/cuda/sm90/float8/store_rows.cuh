// D = A B^T + bias, by row: StoreRows of epilogues.cuh without a rest that waits for the next tile,
// whose registers are the waves' here.
#pragma once
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/float8/warp_rows.cuh"

namespace guild::cuda {

template <class T>
struct StoreRowsAtOnce {
  ByteRows d;
  int columns;
  Bias<T> bias;  // (E, columns)

  using Storage = StoreBoxes;
  template <int n>
  struct Parcel {
    static constexpr int kMostSteps = 0, kBytes = sizeof(T);

    __device__ bool left() const { return false; }
    __device__ void begin(StoreRowsAtOnce const& e, float const (&acc)[n / 2], StoreBoxes& boxes,
                          Tile const& tile, int thread) {
#pragma unroll
      for (int i = 0; i < n / 64; ++i) {
        int const col = tile.col + 64 * i;
        if (col >= e.columns) break;
        uint32_t const box = boxes.address(i % 2);
        fragment_to_box<T>(box, acc + 32 * i, thread);
        e.d.store(box, tile, kBytes * col, kBytes * e.columns, thread);
      }
    }
    __device__ void step(StoreRowsAtOnce const&, StoreBoxes&, int) {}
  };

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    return bias.template start<n>(acc, tile, columns, thread);
  }
};

}  // namespace guild::cuda
