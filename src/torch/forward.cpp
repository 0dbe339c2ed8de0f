// Sizes, buffers and arguments of a layer's forward calls.
#include "torch/forward.h"

#include "cuda/rows/ungrouped_rows.h"

namespace guild::binding {

Layer layer_of(Place const& place, Tensor const& x, Slots const& slots, Tensor const& w_down,
               Activation activation, Flags flags) {
  require_dims(x, "x", 2);
  require_dims(w_down, "w_down", 3);
  Sizes const sizes{.tokens = x.size(0),
                    .hidden = x.size(1),
                    .intermediate = w_down.size(flags.transposed ? 1 : 2),
                    .experts = w_down.size(0),
                    .top_k = slots.top_k,
                    .slots = slots.count};
  return {sizes,
          dtype_of(x, "x"),
          activation,
          order_of(flags.interleaved),
          flags.transposed,
          place.lists(flags.experts_at, "experts_at", Layer::kLists, sizes.experts)};
}

void clear_outside(Place const& place, Tensor const& rows, int32_t const* offsets,
                   int64_t experts) {
  if (!place.on_cuda()) return place.clear(rows);
  cuda::clear_ungrouped_rows({.d = rows.data_ptr(),
                              .row_stride = rows.stride(0),
                              .col_stride = rows.stride(1),
                              .last = offsets + experts,
                              .rows = rows.size(0),
                              .n = rows.size(1),
                              .element_bytes = int(element_bytes(dtype_of(rows, "rows"))),
                              .first = offsets},
                             place.queue());
}

Tensor sorted_rows(Place const& place, Shape shape, DType dtype, int32_t const* offsets,
                   int64_t experts) {
  Tensor const made = place.empty(shape, dtype);
  clear_outside(place, made, offsets, experts);
  return made;
}

MoeForward forward_args(Place const& place, Layer const& layer, Routing const& routing,
                        Tensor const& x, Weights const& w, MaybeTensor const& b_up,
                        MaybeTensor const& b_down, void* workspace) {
  Sizes const& s = layer.sizes;
  MoeForward f;
  f.sizes = s;
  f.dtype = layer.dtype;
  f.activation = layer.activation;
  f.order = layer.order;
  f.routing = routing;
  f.x = place.rows(x, "x", layer.dtype, {s.tokens, s.hidden});
  f.w_up = as_const(up_weight_of(place, layer, w.up, w.gate, layer.dtype));
  f.w_down = down_weight_of(place, layer, w.down, layer.dtype);
  f.b_up = place.rows(b_up, "b_up", layer.dtype, {s.experts, layer.width()});
  f.b_down = place.rows(b_down, "b_down", layer.dtype, {s.experts, s.hidden});
  f.workspace = workspace;
  return f;
}

}  // namespace guild::binding
