// The up projection's epilogue: from the pre-activations H of a tile to A = activation(H).
//
// The activation sees the unrounded sums, so it comes first; packed, H and A leave beside the next
// tile's products. A half of the tile is two boxes of H and makes one of A, or two without a gate.
#pragma once
#include "epilogues.cuh"

namespace guild::cuda {

// H = A B^T + bias, kept for backward; A = activation(H).
template <class T>
struct Activate {
  RowOutput<T> h;  // absent in inference; columns = I in two halves, 2I interleaved, or I
  RowOutput<T> a;  // columns = I
  Bias<T> bias;    // (E, W), ordered as h
  Activation activation;
  Pairing pairing;

  using Storage = StoreBoxes;

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

  template <int n>
  class Parcel {
    static_assert(n == 256);

   public:
    __device__ bool left() const { return at < end; }

    __device__ void begin(Activate const& e, float (&acc)[n / 2], StoreBoxes& boxes,
                          Tile const& rows, int thread) {
      tile = rows;
      at = end = 0;
      if (tile.rows <= 0) return;
      int const width = e.pairing == Pairing::none ? 128 : 64;  // of a half, in columns of A
      int const columns = e.a.columns - e.first_column(tile);   // of A that are left
      int const halves = columns > width ? 2 : 1;
      // One copy of the code, at which the accumulators pass by: unrolled it would outgrow the
      // instruction cache.
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        e.pack_h(h, acc);
        if (e.pairing == Pairing::none) {
          if (e.h.present) e.put_h(h, half, boxes, tile, thread);
          e.activate_alone(acc, columns - width * half);
          pack_box<T>(h[0], acc);
          pack_box<T>(h[1], acc + 32);
          if (half == 0) e.put_two_a(h, half, boxes, tile, thread);
        } else {
          if (half == 0 && e.h.present) e.put_h(h, half, boxes, tile, thread);
          e.activate_pairs(acc, columns - width * half, thread);
          pack_box<T>(a, acc);
          if (half == 0) e.put_a(a, half, boxes, tile, thread);
        }
        e.pass(acc);
      }
      if (halves == 1) return;
      end = 2;
      at = e.pairing == Pairing::none || !e.h.present ? 1 : 0;
    }

    __device__ void step(Activate const& e, StoreBoxes& boxes, int thread) {
      if (at++ == 0) return e.put_h(h, 1, boxes, tile, thread);
      if (e.pairing == Pairing::none) return e.put_two_a(h, 1, boxes, tile, thread);
      e.put_a(a, 1, boxes, tile, thread);
    }

   private:
    HalfWords h;  // of the second half; without a gate its A
    BoxWords a;   // of the second half, with a gate
    Tile tile;
    int at = 0, end = 0;
  };

 private:
  static constexpr int kHalf = 64;  // accumulators of half a tile

  __device__ int first_column(Tile const& tile) const {  // of A
    return pairing == Pairing::alternate ? tile.col / 2 : tile.col;
  }

  // The first half's accumulators to two boxes: gate and up where those are apart.
  __device__ void pack_h(HalfWords& word, float const* acc) const {
    pack_box<T>(word[0], acc);
    if (pairing == Pairing::halves) {
      pack_box<T>(word[1], acc + kHalf);
    } else {
      pack_box<T>(word[1], acc + 32);
    }
  }

  // Moves the second half's accumulators to where the first half's were.
  __device__ void pass(float* acc) const {
    if (pairing == Pairing::halves) {
#pragma unroll
      for (int i = 0; i < 32; ++i) acc[i] = acc[i + 32], acc[kHalf + i] = acc[kHalf + 32 + i];
    } else {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) acc[i] = acc[kHalf + i];
    }
  }

  __device__ void put_h(HalfWords const& word, int half, StoreBoxes const& boxes, Tile const& tile,
                        int thread) const {
    bool const halves = pairing == Pairing::halves;
    boxes.put(word, thread, [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const col = tile.col + (halves ? 64 * half : 128 * half + 64 * i);
        if (col < h.columns) h.store(boxes.box[i], tile, col, halves ? i : 0);
      }
    });
  }

  // A of one half: one box with a gate, two without.
  __device__ void put_a(BoxWords const& word, int half, StoreBoxes const& boxes, Tile const& tile,
                        int thread) const {
    boxes.wait(thread);
    words_to_box(boxes.address(0), word, thread);
    boxes.send(thread, [&] { a.store(boxes.box[0], tile, first_column(tile) + 64 * half, 0); });
  }
  __device__ void put_two_a(HalfWords const& word, int half, StoreBoxes const& boxes,
                            Tile const& tile, int thread) const {
    int const col = tile.col + 128 * half;
    boxes.put(word, thread, [&] {
      a.store(boxes.box[0], tile, col, 0);
      if (col + 64 < a.columns) a.store(boxes.box[1], tile, col + 64, 0);
    });
  }

  // Gate and up of the first half's `left` columns of A, 64 at most, to A in the first 32
  // accumulators.
  __device__ void activate_pairs(float* acc, int left, int thread) const {
    if (pairing == Pairing::halves) {
      activate_halves(acc, acc + kHalf, left);
    } else {
      activate_neighbours(acc, 2 * left, thread);
    }
  }

  // The way out every 16 columns keeps the compiler from starting all at once: it has no registers
  // for that.
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
      for (int i = 0; i < 64; ++i) {
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
