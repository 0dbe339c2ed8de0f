// Shared by all forward calls of a layer: its sizes, derived from the tensors, and the core's
// arguments.
#pragma once
#include "torch/tensors.h"

namespace guild::binding {

struct Flags {
  bool interleaved, transposed;
  MaybeTensor const& experts_at;
};

Layer layer_of(Place const& place, Tensor const& x, Slots const& slots, Tensor const& w_down,
               Activation activation, Flags flags);

struct Weights {
  Tensor const& up;
  MaybeTensor const& gate;
  Tensor const& down;
};

// Clears the rows of a result of sorted rows that belong to no expert, which no product writes.
// offsets: (E + 1).
void clear_outside(Place const& place, Tensor const& rows, int32_t const* offsets, int64_t experts);
Tensor sorted_rows(Place const& place, Shape shape, DType dtype, int32_t const* offsets,
                   int64_t experts);

// Outputs are made by the caller.
MoeForward forward_args(Place const& place, Layer const& layer, Routing const& routing,
                        Tensor const& x, Weights const& w, MaybeTensor const& b_up,
                        MaybeTensor const& b_down, void* workspace);

}  // namespace guild::binding
