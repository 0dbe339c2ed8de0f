// One struct per fused output. An epilogue is a function from a tile of accumulators to memory.
//
// start() may fill the accumulators before the tile's products and says whether it has; store()
// runs after them. State lives in registers from tile to tile, Storage in shared memory, one a
// consumer warpgroup.
#pragma once
#include "outputs.cuh"
#include "shared/tiles.h"

namespace guild::cuda {

// Stores a tile's n columns, up to `columns` of the matrix, box by box: fill(box, value) and
// store(box, col) for the 64 columns from `col`.
template <int n, class Fill, class Store>
__device__ inline void store_columns(float const (&acc)[n / 2], StoreRing& ring, Tile const& tile,
                                     int columns, int thread, Fill&& fill, Store&& store) {
#pragma unroll
  for (int c = 0; c < n; c += 128) {
    int const col = tile.col + c;
    if (col >= columns) break;
    auto const fill_one = [&](int i, uint32_t box) { fill(box, acc + c / 2 + 32 * i); };
    auto const store_one = [&](int i, char* box) { store(box, col + 64 * i); };
    if (c + 64 < n) {
      ring.store<2>(thread, fill_one, store_one);
    } else {
      ring.store<1>(thread, fill_one, store_one);
    }
  }
}

// D = A B^T + bias, by row.
template <class T>
struct StoreRows {
  RowOutput<T> d;
  Bias<T> bias;  // (E, columns)

  using Storage = StoreBoxes;
  using State = StoreRing;
  static constexpr bool kReads = false;

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    return bias.template start<n>(acc, tile, d.columns, thread);
  }
  template <int n>
  __device__ void store(float (&acc)[n / 2], StoreRing& ring, Tile const& tile, int thread) const {
    store_columns<n>(
        acc, ring, tile, d.columns, thread,
        [&](uint32_t box, float const* value) { fragment_to_box<T>(box, value, thread); },
        [&](char* box, int col) { d.store(box, tile, col, 0); });
  }
};

// The same, or one matrix per expert, in float32, of odd strides, or added to what is there.
template <class T>
struct StoreDirect {
  DirectOutput d;
  Bias<T> bias;

  struct Storage {};
  struct State {
    __device__ explicit State(Storage&) {}
  };
  static constexpr bool kReads = false;

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    return bias.template start<n>(acc, tile, d.columns, thread);
  }
  template <int n>
  __device__ void store(float (&acc)[n / 2], State&, Tile const& tile, int thread) const {
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
  using State = StoreRing;
  static constexpr bool kReads = false;

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }
  template <int n>
  __device__ void store(float (&acc)[n / 2], StoreRing& ring, Tile const& tile, int thread) const {
    store_columns<n>(
        acc, ring, tile, columns, thread,
        [&](uint32_t box, float const* value) {
          if (transposed) {
            fragment_to_box_transposed<T>(box, value, thread);
          } else {
            fragment_to_box<T>(box, value, thread);
          }
        },
        [&](char* box, int col) {
          int const x = transposed ? tile.row : col, y = transposed ? col : tile.row;
          tma_store(map, box, Coordinate{x, y, tile.expert});
        });
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

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    if (bias.data == nullptr) return false;
    int const e = tile.expert, col = tile.col, columns = a.columns;
    if (pairing == Pairing::halves) {
      bias.template fill<n / 2>(acc, e, 0, col, columns, thread);
      bias.template fill<n / 2>(acc + n / 4, e, columns, col, columns, thread);
    } else {
      int const all = pairing == Pairing::alternate ? 2 * columns : columns;
      bias.template fill<n>(acc, e, 0, col, all, thread);
    }
    return true;
  }

  // Box by box of A, in one copy of the code at which the accumulators pass by: unrolled it would
  // outgrow the instruction cache.
  template <int n>
  __device__ void store(float (&acc)[n / 2], StoreRing& ring, Tile const& tile, int thread) const {
    switch (pairing) {
      case Pairing::halves:
        return store_halves<n>(acc, ring, tile, thread);
      case Pairing::alternate:
        return store_alternate<n>(acc, ring, tile, thread);
      default:
        return store_alone<n>(acc, ring, tile, thread);
    }
  }

 private:
  template <int n>
  __device__ void store_halves(float (&acc)[n / 2], StoreRing& ring, Tile const& tile,
                               int thread) const {
    float *const gate = acc, *const up = acc + n / 4;
    int const end = min(n / 2, a.columns - tile.col);
#pragma unroll 1
    for (int c = 0; c < end; c += 64) {
      int const col = tile.col + c;
      if (h.present) {
        ring.store<2>(
            thread,
            [&](int i, uint32_t box) { fragment_to_box<T>(box, i == 0 ? gate : up, thread); },
            [&](int i, char* box) { h.store(box, tile, col, i); });
      }
      activate_halves(gate, up, end - c);
      store_a(gate, ring, tile, col, thread);
      pass<n / 4 - 32>(gate, 32);
      pass<n / 4 - 32>(up, 32);
    }
  }

  template <int n>
  __device__ void store_alternate(float (&acc)[n / 2], StoreRing& ring, Tile const& tile,
                                  int thread) const {
    int const columns = 2 * a.columns, end = min(n, columns - tile.col);
#pragma unroll 1
    for (int c = 0; c < end; c += 128) {
      int const col = tile.col + c;
      if (h.present) {
        ring.store<2>(
            thread, [&](int i, uint32_t box) { fragment_to_box<T>(box, acc + 32 * i, thread); },
            [&](int i, char* box) { h.store(box, tile, col + 64 * i, 0); });
      }
      activate_neighbours(acc, end - c, thread);
      store_a(acc, ring, tile, col / 2, thread);
      pass<n / 2 - 64>(acc, 64);
    }
  }

  template <int n>
  __device__ void store_alone(float (&acc)[n / 2], StoreRing& ring, Tile const& tile,
                              int thread) const {
    int const end = min(n, a.columns - tile.col);
#pragma unroll 1
    for (int c = 0; c < end; c += 64) {
      int const col = tile.col + c;
      if (h.present) {
        ring.store<1>(
            thread, [&](int, uint32_t box) { fragment_to_box<T>(box, acc, thread); },
            [&](int, char* box) { h.store(box, tile, col, 0); });
      }
      activate_alone(acc, end - c);
      store_a(acc, ring, tile, col, thread);
      pass<n / 2 - 32>(acc, 32);
    }
  }

  __device__ void store_a(float const* value, StoreRing& ring, Tile const& tile, int col,
                          int thread) const {
    ring.store<1>(
        thread, [&](int, uint32_t box) { fragment_to_box<T>(box, value, thread); },
        [&](int, char* box) { a.store(box, tile, col, 0); });
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
