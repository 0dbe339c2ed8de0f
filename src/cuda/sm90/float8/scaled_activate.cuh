// The up projection's epilogue with quantised results: activation(H) as codes and scales, from a
// tile's pre-activations H: gate and up of 128 columns or, without a gate, 256 columns.
//
// A scale of A covers all or half of a tile's columns, so a quad can find a row's largest value by
// itself. H is stored first, from the same registers, rounded or quantised.
#pragma once
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/float8/quantized_fragment.cuh"

namespace guild::cuda {

// What is kept of H.
enum class Kept : int { nothing, rounded, codes };

template <class T, StaticActivation known>
struct ScaledActivate {
  Kept kept;
  RowOutput<T> h;      // columns = I in two halves, 2I interleaved, or I
  CodeOutput h_codes;  // (R, W) in halves
  CodeOutput a;        // (R, I)
  Bias<T> bias;        // (E, W), ordered as h
  int columns;         // of A
  ActivationOf<float> activation;
  StaticPairing<known> pairing;  // of h and bias; in a tile gate and up are always halves

  using Storage = StoreBoxes;

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    if (bias.data == nullptr) return false;
    int const e = tile.expert, col = tile.col;
    if (pairing == Pairing::alternate) {
      fill_alternating(acc, e, col, thread);
    } else if (pairing == Pairing::halves) {
      bias.template fill<n / 2>(acc, e, 0, col, columns, thread);
      bias.template fill<n / 2>(acc + n / 4, e, columns, col, columns, thread);
    } else {
      bias.template fill<n>(acc, e, 0, col, columns, thread);
    }
    return true;
  }

  template <int n>
  struct Parcel {
    static_assert(n == 256);
    static constexpr int kMostSteps = 0;

    __device__ bool left() const { return false; }
    __device__ void begin(ScaledActivate const& e, float (&acc)[n / 2], StoreBoxes& boxes,
                          Tile const& tile, int thread) {
      if (e.pairing == Pairing::none) {
        e.template store_alone<0>(acc, boxes, tile, thread);
        e.template store_alone<1>(acc, boxes, tile, thread);
      } else {
        e.store_gated(acc, boxes, tile, thread);
      }
    }
    __device__ void step(ScaledActivate const&, StoreBoxes&, int) {}
  };

 private:
  // Gate and up of 128 columns; A overwrites gate. TMA reads half of H while A is computed from it.
  __device__ void store_gated(float (&acc)[128], StoreBoxes const& boxes, Tile const& tile,
                              int thread) const {
    float *const gate = acc, *const up = acc + 64;
    if (kept == Kept::codes) {
      put_codes(h_codes, gate, boxes.address(0), tile, tile.col, 0, thread);
      put_codes(h_codes, up, boxes.address(1), tile, tile.col, 1, thread);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float *const g = gate + 32 * part, *const u = up + 32 * part;
      int const col = tile.col + 64 * part;
      if (kept == Kept::rounded && col < columns) put_h(g, u, boxes, tile, col, thread);
      activate_pairs(g, u, columns - col);
    }
    if (kept == Kept::rounded) boxes.wait(thread);
    put_codes(a, gate, boxes.address(0), tile, tile.col, 0, thread);
  }

  // Block `block` of 128 columns without a gate; A overwrites H.
  template <int block>
  __device__ void store_alone(float (&acc)[128], StoreBoxes const& boxes, Tile const& tile,
                              int thread) const {
    float* const value = acc + 64 * block;
    int const col = tile.col + 128 * block;
    if (col >= columns) return;
    if (kept == Kept::codes) put_codes(h_codes, value, boxes.address(0), tile, col, 0, thread);
    if (kept == Kept::rounded) put_h(value, value + 32, boxes, tile, col, thread);
    activate_alone(value, columns - col);
    if (kept == Kept::rounded) boxes.wait(thread);
    put_codes(a, value, boxes.address(0), tile, col, 0, thread);
  }

  // Stores 64 columns of gate and of up or, without a gate, 128 columns.
  __device__ void put_h(float const* first, float const* second, StoreBoxes const& boxes,
                        Tile const& tile, int col, int thread) const {
    bool const alternates = pairing == Pairing::alternate, alone = pairing == Pairing::none;
    boxes.wait(thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (alternates) {
        alternating_to_box<T>(boxes.address(i), first + 16 * i, second + 16 * i, thread);
      } else {
        fragment_to_box<T>(boxes.address(i), i == 0 ? first : second, thread);
      }
    }
    boxes.send(thread, [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const at = alternates ? 2 * col + 64 * i : alone ? col + 64 * i : col;
        if (at < h.columns) h.store(boxes.box[i], tile, at, pairing == Pairing::halves ? i : 0);
      }
    });
  }

  __device__ void fill_alternating(float* acc, int expert, int col, int thread) const {
    T const* const row = bias.data + expert * bias.stride;
#pragma unroll
    for (int block = 0; block < 16; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const c = col + 8 * block + fragment_column(thread) + i;
        float2 const b = c < columns ? unpack<T>(*reinterpret_cast<uint32_t const*>(row + 2 * c))
                                     : float2{0.f, 0.f};
        acc[4 * block + i] = acc[4 * block + 2 + i] = b.x;
        acc[64 + 4 * block + i] = acc[64 + 4 * block + 2 + i] = b.y;
      }
    }
  }

  // 64 columns. The early exit every 16 columns keeps the compiler from interleaving all columns,
  // which would spill.
  __device__ void activate_pairs(float* gate, float const* up, int left) const {
    with_static_family<known>(activation, [&, act = with_gate(activation, true)](auto family) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i % 8 == 0 && 2 * i >= left) break;
        gate[i] = activate<family.value>(act, gate[i], up[i]);
      }
    });
  }
  // 128 columns.
  __device__ void activate_alone(float* value, int left) const {
    with_static_family<known>(activation, [&, act = with_gate(activation, false)](auto family) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        if (i % 8 == 0 && 2 * i >= left) break;
        value[i] = activate<family.value>(act, value[i], 0.f);
      }
    });
  }
};

}  // namespace guild::cuda
