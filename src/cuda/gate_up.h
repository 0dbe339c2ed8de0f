// The up projection's weight as the GPU's products take it: gate and up as two matrices, or one
// packed matrix of alternating gate and up rows. H, its gradient and the bias have the same order.
#pragma once
#include "cuda/alignment.h"
#include "cuda/products.h"

namespace guild::cuda {

template <class W>
struct GateUpView {
  W w[2];         // gate and up; or, where there is one matrix only, that one twice
  int64_t width;  // rows of one of them: I, or 2I where alternating
  int halves;     // 2 for gate and up as two matrices, else 1
  Pairing pairing;
};

inline Pairing pairing_of(bool gated, GateUp order) {
  if (!gated) return Pairing::none;
  return order == GateUp::interleaved ? Pairing::alternate : Pairing::halves;
}

// Whether every expert's up lies `distance` elements behind its gate, with the same strides.
template <class W>
bool are_one_matrix(GatedWeight<W> const& w, int64_t experts, int64_t distance,
                    int64_t element_bytes) {
  return w.gate.out_stride == w.up.out_stride && w.gate.in_stride == w.up.in_stride &&
         (experts <= 1 || w.gate.expert_stride == w.up.expert_stride) &&
         w.gate.expert_at == w.up.expert_at &&
         static_cast<char const*>(w.up.data) - static_cast<char const*>(w.gate.data) ==
             distance * element_bytes;
}

template <class W>
GateUpView<W> gate_up_view(GatedWeight<W> const& weight, Sizes const& sizes, bool gated,
                           GateUp order, int64_t element_bytes, char const* name) {
  int64_t const width = sizes.intermediate;
  Pairing const pairing = pairing_of(gated, order);
  if (pairing == Pairing::none) return {{weight.gate, weight.gate}, width, 1, pairing};
  if (pairing == Pairing::halves) return {{weight.gate, weight.up}, width, 2, pairing};
  W packed = weight.gate;
  packed.out_stride /= 2;
  require(weight.gate.out_stride % 2 == 0 &&
              are_one_matrix(weight, sizes.experts, packed.out_stride, element_bytes),
          name, ": expected alternating gate and up rows for interleaved pre-activations on CUDA");
  return {{packed, packed}, 2 * width, 1, pairing};
}

// One kernel reads both halves.
inline void require_same_layout(GateUpView<ConstWeight> const& view, char const* name) {
  auto const first = view.w[0].in_stride == 1, second = view.w[1].in_stride == 1;
  require(first == second, name,
          ": expected gate and up with the same contiguous dimension on CUDA, got strides (",
          view.w[0].out_stride, ", ", view.w[0].in_stride, ") and (", view.w[1].out_stride, ", ",
          view.w[1].in_stride, ")");
}

}  // namespace guild::cuda
