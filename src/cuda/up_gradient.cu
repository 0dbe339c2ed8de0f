// dX~ = dH W1, by row
#include "check.h"
#include "cuda/gate_up.h"
#include "cuda/products.h"

namespace guild::cuda {

void up_gradient(UpGradient const& x, Queue queue) {
  check(x);
  require_layer(x.sizes, x.dtype);
  require_aligned(x.dh, "dh");
  require_aligned(x.dx, "dx");
  auto const view = gate_up_view(x.w_up, x.sizes, x.gated, x.order, /*element_bytes=*/2, "w_up");
  for (ConstWeight const& w : view.w) require_aligned(w, "w_up");
  Sizes const& s = x.sizes;
  auto const transposed = [](ConstWeight const& w) {
    return ConstWeight(w.data, w.expert_stride, w.in_stride, w.out_stride);
  };
  row_product({.dtype = x.dtype,
               .rows = s.rows(),
               .n = s.hidden,
               .k = view.width,
               .groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
               .a = x.dh,
               .halves = view.halves,
               .w = {transposed(view.w[0]), transposed(view.w[1])},
               .bias = {},
               .d = x.dx,
               .direct = {}},
              queue);
}

}  // namespace guild::cuda
