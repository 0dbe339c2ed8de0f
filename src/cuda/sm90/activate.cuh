// The up projection's epilogue: A = activation(H), H the pre-activations of a tile.
//
// The activation is applied to the unrounded sums: to one half of the tile at once, to the other
// half, which stays in registers, during the next tile's products.
#pragma once
#include "cuda/sm90/epilogues.cuh"

namespace guild::cuda {

// H = A B^T + bias, kept for backward; A = activation(H).
template <class T, StaticActivation known>
struct Activate {
  RowOutput<T> h;  // absent in inference; columns = I in two halves, 2I interleaved, or I
  int h_rows;      // tiles that end later are not kept
  RowOutput<T> a;  // columns = I
  Bias<T> bias;    // (E, W), ordered as h
  ActivationOf<float> activation;
  StaticPairing<known> pairing;

  using Storage = StoreBoxes;
  // A thread's sums of half a tile, which are two boxes of H (gate and up for Pairing::halves). A
  // overwrites the first 32 sums or, without a gate, all 64.
  using HalfSums = float[64];

  __device__ bool has_bias() const { return bias.data != nullptr; }
  template <int n>
  __device__ void load_bias(Tile const& tile, char* to, Barrier& full) const {
    int const e = tile.expert, col = tile.col, columns = a.columns;
    if (pairing == Pairing::halves) {
      int const count = min(n / 2, columns - col);
      bias.load(to, e, 0, col, count, full);
      bias.load(to + n / 2 * kElementBytes, e, columns, col, count, full);
    } else {
      int const all = pairing == Pairing::alternate ? 2 * columns : columns;
      bias.load(to, e, 0, col, min(n, all - col), full);
    }
  }

  template <int n>
  class Parcel {
    static_assert(n == 256);

   public:
    static constexpr int kMostSteps = 3;

    __device__ bool left() const { return at < kMostSteps; }

    __device__ void begin(Activate const& e, float const (&acc)[n / 2], StoreBoxes& boxes,
                          Tile const& rows, int thread) {
      tile = rows;
      at = kMostSteps;
      if (tile.rows <= 0) return;
      columns = e.a.columns - e.first_column(tile);
      e.take(sums, acc, 0);
      if (e.h.present) e.put_h(sums, 0, boxes, tile, thread);
#pragma unroll
      for (int part = 0; part < 2; ++part) e.activate_part(sums, part, columns, thread);
      e.put_a(sums, 0, boxes, tile, thread);
      columns -= e.pairing == Pairing::none ? 128 : 64;
      if (columns <= 0) return;
      e.take(sums, acc, 1);
      at = e.h.present ? 0 : 1;
    }

    __device__ void step(Activate const& e, StoreBoxes& boxes, int thread) {
      switch (at++) {
        case 0:
          e.put_h(sums, 1, boxes, tile, thread);
          break;
        case 1:
          e.activate_part(sums, 0, columns, thread);
          break;
        default:
          e.activate_part(sums, 1, columns, thread);
          e.put_a(sums, 1, boxes, tile, thread);
      }
    }

   private:
    HalfSums sums;  // the second half
    Tile tile;
    int columns;          // columns of A that exist from the second half on
    int at = kMostSteps;  // the next step
  };

 private:
  __device__ int first_column(Tile const& tile) const {  // of A
    return pairing == Pairing::alternate ? tile.col / 2 : tile.col;
  }

  __device__ void take(HalfSums& sums, float const* acc, int half) const {
    if (pairing == Pairing::halves) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        sums[i] = acc[32 * half + i], sums[32 + i] = acc[64 + 32 * half + i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[i] = acc[64 * half + i];
    }
  }

  __device__ void put_h(HalfSums const& sums, int half, StoreBoxes const& boxes, Tile const& tile,
                        int thread) const {
    bool const halves = pairing == Pairing::halves;
    boxes.put<T>(sums, 2, thread, [&] {
      if (tile.row + tile.rows > h_rows) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const col = tile.col + (halves ? 64 * half : 128 * half + 64 * i);
        if (col < h.columns) h.store(boxes.box[i], tile, col, halves ? i : 0);
      }
    });
  }
  __device__ void put_a(HalfSums const& sums, int half, StoreBoxes const& boxes, Tile const& tile,
                        int thread) const {
    int const count = pairing == Pairing::none ? 2 : 1;
    boxes.put<T>(sums, count, thread, [&] {
      int const col = first_column(tile) + 64 * count * half;
      a.store(boxes.box[0], tile, col, 0);
      if (count == 2 && col + 64 < a.columns) a.store(boxes.box[1], tile, col + 64, 0);
    });
  }

  // Computes part 0 or 1 of a half's A from its sums, in place; `left` columns of A exist from the
  // half's first on.
  __device__ void activate_part(HalfSums& sums, int part, int left, int thread) const {
    if (pairing == Pairing::halves) {
      activate_halves(sums + 16 * part, sums + 32 + 16 * part, left - 32 * part);
    } else if (pairing == Pairing::alternate) {
      activate_neighbours(sums, part, 2 * left, thread);
    } else {
      activate_alone(sums + 32 * part, left - 64 * part);
    }
  }

  // Without the early exit every 16 columns, the compiler interleaves all columns and spills.
  __device__ void activate_halves(float* gate, float const* up, int left) const {
    with_static_family<known>(activation, [&, act = with_gate(activation, true)](auto family) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i % 8 == 0 && 2 * i >= left) break;
        gate[i] = activate<family.value>(act, gate[i], up[i]);
      }
    });
  }
  __device__ void activate_alone(float* value, int left) const {
    with_static_family<known>(activation, [&, act = with_gate(activation, false)](auto family) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i % 8 == 0 && 2 * i >= left) break;
        value[i] = activate<family.value>(act, value[i], 0.f);
      }
    });
  }

  // Turns part 0 or 1 of up to 128 columns of (gate, up) pairs, of which `left` exist, into half as
  // many columns of A, in place. Two blocks of 8 columns become one block of A: a thread's pairs
  // give its columns q and 4 + q (q = thread % 4), but the fragment layout wants columns 2q and 2q
  // + 1, hence the shuffles.
  __device__ void activate_neighbours(float* pairs, int part, int left, int thread) const {
    int const q = thread % 4, from = thread % 32 / 4 * 4 + 2 * q % 4;
    auto const act = with_constants<known>(with_gate(activation, true));
    with_static_family<known>(activation, [&](auto family) {
#pragma unroll
      for (int block = 4 * part; block < 4 * part + 4; ++block) {
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
