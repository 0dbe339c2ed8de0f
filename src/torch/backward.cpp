// Arguments of a layer's backward calls, and the tensors for the gradients that are wanted.
#include "torch/backward.h"

namespace guild::binding {

MoeBackward backward_args(Place const& place, Layer const& layer, Routing const& routing,
                          Tensor const& dout, Tensor const& h, Weights const& w,
                          MaybeTensor const& b_down, int64_t h_rows) {
  Sizes const& s = layer.sizes;
  MoeBackward b;
  b.sizes = s;
  b.dtype = b.dw_dtype = layer.dtype;
  b.activation = layer.activation;
  b.order = layer.order;
  b.routing = routing;
  b.dout = place.rows(dout, "dout", layer.dtype, {s.tokens, s.hidden});
  b.h = place.rows(h, "h", layer.dtype, {h_rows, layer.width()});
  b.w_up = as_const(up_weight_of(place, layer, w.up, w.gate, layer.dtype));
  b.w_down = down_weight_of(place, layer, w.down, layer.dtype);
  b.b_down = place.rows(b_down, "b_down", layer.dtype, {s.experts, s.hidden});
  return b;
}

Tensor dx_of(Place const& place, Layer const& layer, Routing const& routing, int64_t wanted) {
  Sizes const& s = layer.sizes;
  require(!(wanted & kRows) || !(wanted & kX), "wanted: expected dx by token or by row, got ",
          wanted);
  if (wanted & kRows) return place.empty({s.rows(), s.hidden}, layer.dtype);
  if (!(wanted & kX)) return place.empty({0}, layer.dtype);
  if (routing.row_token != nullptr) return place.empty({s.tokens, s.hidden}, layer.dtype);
  return sorted_rows(place, {s.tokens, s.hidden}, layer.dtype, routing.offsets, s.experts);
}

Tensor dscores_of(Place const& place, Layer const& layer, Slots const& slots, int64_t wanted) {
  DType const dtype = score_dtype(layer.dtype);
  return wanted & kScores ? slots.empty(place, dtype) : place.empty({0}, dtype);
}

BackwardCall backward_call(Place const& place, Layer const& layer, Routing const& routing,
                           Slots const& slots, Tensor const& dout, Tensor const& x, Tensor const& h,
                           Weights const& w, MaybeTensor const& b_down, int64_t wanted,
                           int64_t h_rows) {
  Sizes const& s = layer.sizes;
  DType const dtype = layer.dtype;
  auto const fresh = [&](int64_t bit, Shape shape) {
    return wanted & bit ? place.empty(shape, dtype) : place.empty({0}, dtype);
  };
  Layer own = layer;  // for the gradients, each one tensor even where the weights are a list
  own.experts_at = nullptr;
  auto const like = [&](int64_t bit, Tensor const& weight, int list) {
    if (!(wanted & bit)) return place.empty({0}, dtype);
    return layer.expert_at(list) == nullptr ? empty_like(weight) : place.stacked_like(weight);
  };
  Gradients g{dx_of(place, layer, routing, wanted),
              dscores_of(place, layer, slots, wanted),
              like(kUp, w.up, Layer::kUp),
              w.gate.has_value() ? like(kUp, *w.gate, Layer::kGate) : place.empty({0}, dtype),
              like(kDown, w.down, Layer::kDown),
              fresh(kUpBias, {s.experts, layer.width()}),
              fresh(kDownBias, {s.experts, s.hidden})};
  MoeBackward b = backward_args(place, layer, routing, dout, h, w, b_down, h_rows);
  b.x = place.rows(x, "x", dtype, {s.tokens, s.hidden});
  (wanted & kRows ? b.dx_rows : b.dx) = {g.dx.data_ptr(), 0};
  b.dscores = g.dscores.data_ptr();
  if (wanted & kUp) {
    MaybeTensor const gate = w.gate.has_value() ? MaybeTensor(g.dw_gate) : std::nullopt;
    b.dw_up = up_weight_of(place, own, g.dw_up, gate, dtype);
  }
  if (wanted & kDown) b.dw_down = down_weight_of(place, own, g.dw_down, dtype);
  b.db_up = {g.db_up.data_ptr(), 0};
  b.db_down = {g.db_down.data_ptr(), 0};
  return {g, b};
}

Routing backward_routing(Place const& place, Layer const& layer, Slots const& slots,
                         Tensor const& offsets, Tensor const& row_token, Tensor const& slot_row,
                         Tensor const& row_score) {
  Sizes const& s = layer.sizes;
  Routing routing = routing_of(place, s, offsets, row_token, row_score, score_dtype(layer.dtype));
  require(slots.tokens == s.tokens, slots.lists() ? "token_offsets" : "slot_row", ": expected ",
          s.tokens, " tokens as in x, got ", slots.tokens);
  routing.slot_row = slots.indices(place, slot_row, "slot_row");
  routing.token_offsets = slots.token_offsets;
  return routing;
}

}  // namespace guild::binding
