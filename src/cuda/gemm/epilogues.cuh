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
  static constexpr bool kReads = false;
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
  static constexpr bool kReads = false;
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
      tma_store(map, box, Coordinate{x, y, tile.expert});
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
  static constexpr bool kReads = false;
  __device__ void begin(State&, Tile const&, int) const {}

  // Box by box of A, in one copy of the code at which the accumulators pass by: unrolled it would
  // outgrow the instruction cache.
  template <int n>
  __device__ void store(float (&acc)[n / 2], State& ring, Tile const& tile, int thread) const {
    add_biases<n>(acc, tile, thread);
    auto const store_box_of = [&](RowOutput<T> const& out, float* value, int col, int half) {
      if (!out.present) return;
      store_rows<T, 64>(out, ring, value, tile.row, col, half, tile.rows, thread);
    };
    if (pairing == Pairing::halves) {
      int const end = min(n / 2, a.columns - tile.col);
#pragma unroll 1
      for (int c = 0; c < end; c += 64) {
        store_box_of(h, acc, tile.col + c, 0);
        store_box_of(h, acc + n / 4, tile.col + c, 1);
        activate_halves(acc, acc + n / 4, end - c);
        store_box_of(a, acc, tile.col + c, 0);
        pass<n / 4 - 32>(acc, 32);
        pass<n / 4 - 32>(acc + n / 4, 32);
      }
    } else if (pairing == Pairing::alternate) {
      int const end = min(n, 2 * a.columns - tile.col);
#pragma unroll 1
      for (int c = 0; c < end; c += 128) {
        store_box_of(h, acc, tile.col + c, 0);
        store_box_of(h, acc + 32, tile.col + c + 64, 0);
        activate_neighbours(acc, end - c, thread);
        store_box_of(a, acc, (tile.col + c) / 2, 0);
        pass<n / 2 - 64>(acc, 64);
      }
    } else {
      int const end = min(n, a.columns - tile.col);
#pragma unroll 1
      for (int c = 0; c < end; c += 64) {
        store_box_of(h, acc, tile.col + c, 0);
        activate_alone(acc, end - c);
        store_box_of(a, acc, tile.col + c, 0);
        pass<n / 2 - 32>(acc, 32);
      }
    }
  }

 private:
  template <int n>
  __device__ void add_biases(float (&acc)[n / 2], Tile const& tile, int thread) const {
    if (bias.data == nullptr) return;
    T const* const b = bias.of(tile.expert);
    if (pairing == Pairing::halves) {
      add_bias<T, n / 2>(acc, b, tile.col, a.columns, thread);
      add_bias<T, n / 2>(acc + n / 4, b + a.columns, tile.col, a.columns, thread);
    } else {
      int const columns = pairing == Pairing::alternate ? 2 * a.columns : a.columns;
      add_bias<T, n>(acc, b, tile.col, columns, thread);
    }
  }

  template <int count>
  static __device__ void pass(float* acc, int steps) {
#pragma unroll
    for (int i = 0; i < count; ++i) acc[i] = acc[i + steps];
  }

  // `left` columns of gate and of up, 64 at most, to those of A in gate's place. The way out every
  // 16 columns keeps the compiler from starting all at once: it has no registers for that.
  __device__ void activate_halves(float* gate, float const* up, int left) const {
    with_family(activation, [&, act = with_gate(activation, true)](auto family) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i % 8 == 0 && 2 * i >= left) break;
        gate[i] = activate<family.value>(act, gate[i], up[i]);
      }
    });
  }
  __device__ void activate_alone(float* value, int left) const {
    with_family(activation, [&, act = with_gate(activation, false)](auto family) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i % 8 == 0 && 2 * i >= left) break;
        value[i] = activate<family.value>(act, value[i], 0.f);
      }
    });
  }

  // `left` columns of gate, up pairs, 128 at most, to half as many of A, in place. Two blocks of 8
  // give one: a thread has its columns q and 4 + q (q = thread % 4) and wants 2q and 2q + 1.
  __device__ void activate_neighbours(float* pairs, int left, int thread) const {
    int const q = thread % 4, from = thread % 32 / 4 * 4 + 2 * q % 4;
    with_family(activation, [&, act = with_gate(activation, true)](auto family) {
#pragma unroll
      for (int block = 0; block < 8; ++block) {
        if (16 * block >= left) break;
        float result[4];
#pragma unroll
        for (int below = 0; below < 2; ++below) {
          float const* v = pairs + 8 * block + 2 * below;
          float const low = activate<family.value>(act, v[0], v[1]);
          float const high = activate<family.value>(act, v[4], v[5]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float const x = __shfl_sync(~0u, low, from + i), y = __shfl_sync(~0u, high, from + i);
            result[2 * below + i] = q < 2 ? x : y;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[4 * block + i] = result[i];
      }
    });
  }
};

}  // namespace guild::cuda
