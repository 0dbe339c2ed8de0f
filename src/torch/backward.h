// Shared by all backward calls of a layer: the wanted gradients, their tensors, and the core's
// arguments.
#pragma once
#include "torch/forward.h"

namespace guild::binding {

// Bits of `wanted`. kRows: dx by row, not summed over a token's rows, in place of kX.
enum Wanted : int64_t {
  kX = 1,
  kScores = 2,
  kUp = 4,
  kDown = 8,
  kUpBias = 16,
  kDownBias = 32,
  kRows = 64
};

// The arguments that all backward calls share; the caller sets outputs and workspace.
MoeBackward backward_args(Place const& place, Layer const& layer, Routing const& routing,
                          Tensor const& dout, Tensor const& h, Weights const& w,
                          MaybeTensor const& b_down, int64_t h_rows);

// The tensor for dX that `wanted` asks for: by token, by row, or empty.
Tensor dx_of(Place const& place, Layer const& layer, Routing const& routing, int64_t wanted);
Tensor dscores_of(Place const& place, Layer const& layer, Slots const& slots, int64_t wanted);

struct Gradients {
  Tensor dx, dscores, dw_up, dw_gate, dw_down, db_up, db_down;
};

// A call into new tensors, without its workspace. h_rows: of h.
struct BackwardCall {
  Gradients gradients;
  MoeBackward args;
};
BackwardCall backward_call(Place const& place, Layer const& layer, Routing const& routing,
                           Slots const& slots, Tensor const& dout, Tensor const& x, Tensor const& h,
                           Weights const& w, MaybeTensor const& b_down, int64_t wanted,
                           int64_t h_rows);

// Sets the caller's gradients of biases, both of one dtype; returns false if none is wanted.
template <class Args>
bool set_bias_targets(Place const& place, Layer const& layer, MaybeTensor const& db_up,
                      MaybeTensor const& db_down, Args& args, DType& dtype) {
  if (!db_up.has_value() && !db_down.has_value()) return false;
  Sizes const& s = layer.sizes;
  dtype = db_up.has_value() ? dtype_of(*db_up, "db_up") : dtype_of(*db_down, "db_down");
  args.db_up = place.rows(db_up, "db_up", dtype, {s.experts, layer.width()});
  args.db_down = place.rows(db_down, "db_down", dtype, {s.experts, s.hidden});
  return true;
}

// The routing of a backward call on tokens, checked against the layer's sizes.
Routing backward_routing(Place const& place, Layer const& layer, Slots const& slots,
                         Tensor const& offsets, Tensor const& row_token, Tensor const& slot_row,
                         Tensor const& row_score);

}  // namespace guild::binding
