// One struct per fused output. An epilogue is a function from a tile of accumulators to memory.
//
// begin() runs before the tile's products and may start loads, store() after them; State lives in
// registers from tile to tile, Storage in shared memory, one a consumer warpgroup.
#pragma once
#include "outputs.cuh"
#include "shared/tiles.h"

namespace guild::cuda {

// D = A B^T + bias, by row.
template <class T>
struct StoreRows {
  RowOutput<T> d;
  Bias<T> bias;         // (E, columns)
  DirectOutput direct;  // instead of d where its data is not null

  using Storage = StoreBoxes;
  using State = StoreRing;
  static __device__ void init(Storage&) {}
  __device__ void begin(State&, Tile const&, int) const {}

  template <int n>
  __device__ void store(float (&acc)[n / 2], State& ring, Tile const& tile, int thread) const {
    if (bias.data != nullptr) {
      add_bias<T, n>(acc, bias.of(tile.expert), tile.col, d.columns, thread);
    }
    if (direct.data != nullptr) {
      store_direct<T, n>(direct, acc, 0, tile.row, tile.col, tile.rows, thread);
    } else {
      store_rows<T, n>(d, ring, acc, tile.row, tile.col, 0, tile.rows, thread);
    }
  }
};

// D[e] = A^T B, one matrix per expert, in either order.
template <class T>
struct StoreExpert {
  CUtensorMap map;  // (columns, rows, E), or (rows, columns, E) where transposed
  bool transposed;  // rows of D are contiguous in memory, not columns
  int columns;
  DirectOutput direct;  // instead of the map where its data is not null

  using Storage = StoreBoxes;
  using State = StoreRing;
  static __device__ void init(Storage&) {}
  __device__ void begin(State&, Tile const&, int) const {}

  template <int n>
  __device__ void store(float (&acc)[n / 2], State& ring, Tile const& tile, int thread) const {
    if (direct.data != nullptr) {
      store_direct<T, n>(direct, acc, tile.expert, tile.row, tile.col, tile.rows, thread);
      return;
    }
#pragma unroll
    for (int c = 0; c < n; c += 64) {
      if (tile.col + c >= columns) break;
      char* const box = ring.acquire(thread);
      if (transposed) {
        fragment_to_box_transposed<T>(shared_address(box), acc + c / 2, thread);
      } else {
        fragment_to_box<T>(shared_address(box), acc + c / 2, thread);
      }
      fence_async_proxy();
      warpgroup_barrier();
      if (thread != 0) continue;
      int const x = transposed ? tile.row : tile.col + c, y = transposed ? tile.col + c : tile.row;
      tma_store(map, box, {x, y, tile.expert});
      tma_store_commit();
    }
  }
};

// H = A B^T + bias, kept for backward; A = activation(H).
template <class T>
struct Activate {
  RowOutput<T> h;  // absent in inference; columns = I in two halves, 2I interleaved, or I
  RowOutput<T> a;  // columns = I
  Bias<T> bias;    // (E, W), ordered as h
  Activation activation;
  Pairing pairing;

  using Storage = StoreBoxes;
  using State = StoreRing;
  static __device__ void init(Storage&) {}
  __device__ void begin(State&, Tile const&, int) const {}

  template <int n>
  __device__ void store(float (&acc)[n / 2], State& ring, Tile const& tile, int thread) const {
    if (pairing == Pairing::halves) {
      if (bias.data != nullptr) {
        T const* const b = bias.of(tile.expert);
        add_bias<T, n / 2>(acc, b, tile.col, a.columns, thread);
        add_bias<T, n / 2>(acc + n / 4, b + a.columns, tile.col, a.columns, thread);
      }
      if (h.data != nullptr) {
        store_rows<T, n / 2>(h, ring, acc, tile.row, tile.col, 0, tile.rows, thread);
        store_rows<T, n / 2>(h, ring, acc + n / 4, tile.row, tile.col, 1, tile.rows, thread);
      }
      with_family(activation, [&](auto family) {
#pragma unroll
        for (int i = 0; i < n / 4; ++i) {
          acc[i] = activate<family.value>(activation, acc[i], acc[i + n / 4]);
        }
      });
      store_rows<T, n / 2>(a, ring, acc, tile.row, tile.col, 0, tile.rows, thread);
      return;
    }
    int const columns = pairing == Pairing::alternate ? 2 * a.columns : a.columns;
    if (bias.data != nullptr) {
      add_bias<T, n>(acc, bias.of(tile.expert), tile.col, columns, thread);
    }
    if (h.data != nullptr) {
      store_rows<T, n>(h, ring, acc, tile.row, tile.col, 0, tile.rows, thread);
    }
    if (pairing == Pairing::alternate) {
      activate_neighbours<n>(acc, thread);
      store_rows<T, n / 2>(a, ring, acc, tile.row, tile.col / 2, 0, tile.rows, thread);
    } else {
      with_family(activation, [&](auto family) {
#pragma unroll
        for (float& x : acc) x = activate<family.value>(activation, x, 0.f);
      });
      store_rows<T, n>(a, ring, acc, tile.row, tile.col, 0, tile.rows, thread);
    }
  }

 private:
  // n columns of gate, up pairs to n / 2 columns of A, in place. Two blocks of 8 columns give one:
  // a thread has its columns q and 4 + q (q = thread % 4) and wants 2q and 2q + 1.
  template <int n>
  __device__ void activate_neighbours(float (&acc)[n / 2], int thread) const {
    int const q = thread % 4, from = thread % 32 / 4 * 4 + 2 * q % 4;
    with_family(activation, [&](auto family) {
#pragma unroll
      for (int block = 0; block < n / 16; ++block) {
        float result[4];
#pragma unroll
        for (int below = 0; below < 2; ++below) {
          float const* v = acc + 8 * block + 2 * below;
          float const low = activate<family.value>(activation, v[0], v[1]);
          float const high = activate<family.value>(activation, v[4], v[5]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float const x = __shfl_sync(~0u, low, from + i), y = __shfl_sync(~0u, high, from + i);
            result[2 * below + i] = q < 2 ? x : y;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[4 * block + i] = result[i];
      }
    });
  }
};

}  // namespace guild::cuda
