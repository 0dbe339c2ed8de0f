// Stores straight from registers, without shared memory and TMA; biases as initial values of sums;
// the part of the activation that is known at compile time.
#pragma once
#include <type_traits>

#include "cuda/arch/bulk.cuh"
#include "cuda/products.h"
#include "cuda/sm90/fragment.cuh"
#include "shared/activation.h"

namespace guild::cuda {

// Stores 64 x n sums, of which `valid` rows exist, at (group, row, col) of matrices with these
// strides. Value: what one instruction moves, a single element or, as float2, two neighbours in a
// row. When accumulating, kAtATime Values are read before the first is written: a round trip to
// memory for each would take longer than the tile's sums.
template <class Value, int n, int kAtATime = 16>
__device__ inline void store_values(DirectOutput const& out, int64_t row_stride, int64_t col_stride,
                                    float const (&acc)[n / 2], int group, int row, int col,
                                    int valid, int thread) {
  constexpr bool pairs = std::is_same_v<Value, float2>;
  using Element = std::conditional_t<pairs, float, Value>;
  int const r = fragment_row(thread), c = col + fragment_column(thread);
  Element* const first = static_cast<Element*>(out.data) +
                         placed(out.group_at, group) * out.group_stride + (row + r) * row_stride +
                         c * col_stride;
  // How far below and beside the thread's first sum its sum i lies (fragment.cuh).
  auto const down = [](int i) { return i % 4 / 2 * 8; };
  auto const across = [](int i) { return i / 4 * 8 + i % 2; };
  auto const exists = [&](int i) { return r + down(i) < valid && c + across(i) < out.columns; };
  auto const place = [&](int i) {
    return reinterpret_cast<Value*>(first + down(i) * row_stride + across(i) * col_stride);
  };
  constexpr int each = pairs ? 2 : 1;
#pragma unroll
  for (int begin = 0; begin < n / 2; begin += kAtATime * each) {
    Value old[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      int const at = begin + each * i;
      old[i] = out.accumulate && exists(at) ? *place(at) : Value{};
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      int const at = begin + each * i;
      if (!exists(at)) continue;
      if constexpr (pairs) {
        *place(at) = {acc[at] + old[i].x, acc[at + 1] + old[i].y};
      } else {
        *place(at) = Value(acc[at] + float(old[i]));
      }
    }
  }
}

// The same, of float32 or T.
template <class T, int n>
__device__ inline void store_direct(DirectOutput const& out, float const (&acc)[n / 2], int group,
                                    int row, int col, int valid, int thread) {
  auto const store = [&](auto element) {
    store_values<decltype(element), n>(out, out.row_stride, out.col_stride, acc, group, row, col,
                                       valid, thread);
  };
  out.is_float ? store(float()) : store(T());
}

// One row of bias per expert; null data: none.
template <class T>
struct Bias {
  T const* data;
  int64_t stride;

  // Fills a fragment of `count` columns with the tile's bias; false if there is no bias.
  template <int count>
  __device__ bool start(float* value, Tile const& tile, int columns, int thread) const {
    if (data == nullptr) return false;
    fill<count>(value, tile.expert, 0, tile.col, columns, thread);
    return true;
  }

  // One thread: announces and issues the load of `count` elements of the expert's bias, from
  // element `first` + `col` on. Rows of the bias, `first`, `col` and `count` are multiples of 16
  // bytes.
  __device__ void load(char* to, int expert, int first, int col, int count, Barrier& full) const {
    full.expect(count * sizeof(T));
    T const* const from = data + expert * stride + first + col;
    bulk_load(shared_address(to), from, count * sizeof(T), shared_address(&full));
  }

  // Fills a fragment of `count` columns, which begins at column `col`, with the expert's bias from
  // element `first` + col on; with zeros at or past column `columns`.
  template <int count>
  __device__ void fill(float* value, int expert, int first, int col, int columns,
                       int thread) const {
    T const* const row = data + expert * stride + first;
#pragma unroll
    for (int block = 0; block < count / 8; ++block) {
      int const c = col + block * 8 + fragment_column(thread);
      float2 const b =
          c < columns ? unpack<T>(*reinterpret_cast<uint32_t const*>(row + c)) : float2{0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) value[4 * block + i] = i % 2 == 0 ? b.x : b.y;
    }
  }
};

// Fills a fragment of n columns with the bias that load_bias() loaded. Columns that do not exist
// get whatever shared memory held before.
template <class T, int n>
__device__ inline void fill_from(char const* bias, float (&value)[n / 2], int thread) {
  auto const word = reinterpret_cast<uint32_t const*>(bias) + thread % 4;
#pragma unroll
  for (int block = 0; block < n / 8; ++block) {
    float2 const b = unpack<T>(word[4 * block]);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[4 * block + i] = i % 2 == 0 ? b.x : b.y;
  }
}

// What is known about the activation at compile time. A kernel with code for all activations and
// column orders loses 4 to 7 % of the up projection's cycles, even though it runs only one of them.
enum class StaticActivation : int {
  any,
  swiglu,   // what most models use: x * sigmoid(x) * up, Pairing::halves
  gpt_oss,  // Family::clamped, Pairing::alternate
};

inline StaticActivation static_activation_of(Activation const& activation, Pairing pairing) {
  bool const plain =
      family_of(activation) == Family::swish && activation.alpha == 1 && activation.up_offset == 0;
  if (plain && pairing == Pairing::halves) return StaticActivation::swiglu;
  bool const clamped = activation.kind == ActivationKind::silu && !activation.clamp_after &&
                       family_of(activation) != Family::swish;
  if (clamped && pairing == Pairing::alternate) return StaticActivation::gpt_oss;
  return StaticActivation::any;
}

// A pairing that is a compile-time constant where it is known.
template <StaticActivation known>
struct StaticPairing {
  Pairing value;
  __device__ operator Pairing() const {
    if (known == StaticActivation::gpt_oss) return Pairing::alternate;
    return known == StaticActivation::swiglu ? Pairing::halves : value;
  }
};

// The activation with its known parameters replaced by compile-time constants.
template <StaticActivation known>
__device__ ActivationOf<float> with_constants(ActivationOf<float> act) {
  if (known == StaticActivation::swiglu) act.alpha = 1, act.up_offset = -0.f;
  if (known == StaticActivation::gpt_oss) act.clamp_after = false;
  return act;
}

// Calls f(std::integral_constant<Family, family>{}).
template <StaticActivation known, class F>
__device__ void with_static_family(ActivationOf<float> const& activation, F&& f) {
  if constexpr (known == StaticActivation::swiglu) {
    f(std::integral_constant<Family, Family::swish>{});
  } else if constexpr (known == StaticActivation::gpt_oss) {
    f(std::integral_constant<Family, Family::clamped>{});
  } else {
    with_family(activation, f);
  }
}

}  // namespace guild::cuda
