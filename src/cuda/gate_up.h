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

template <class W>
GateUpView<W> gate_up_view(GatedWeight<W> const& weight, Sizes const& sizes, bool gated,
                           GateUp order, int64_t element_bytes, char const* name) {
  int64_t const width = sizes.intermediate;
  Pairing const pairing = pairing_of(gated, order);
  if (pairing == Pairing::none) return {{weight.gate, weight.gate}, width, 1, pairing};
  if (pairing == Pairing::halves) return {{weight.gate, weight.up}, width, 2, pairing};
  W packed = weight.gate;
  packed.out_stride /= 2;
  auto const distance =
      static_cast<char const*>(weight.up.data) - static_cast<char const*>(weight.gate.data);
  require(weight.gate.out_stride % 2 == 0 && weight.gate.out_stride == weight.up.out_stride &&
              weight.gate.in_stride == weight.up.in_stride &&
              weight.gate.expert_at == weight.up.expert_at &&
              distance == packed.out_stride * element_bytes,
          name, ": expected alternating gate and up rows for interleaved pre-activations on CUDA");
  return {{packed, packed}, 2 * width, 1, pairing};
}

}  // namespace guild::cuda
