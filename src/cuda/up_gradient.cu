// dX~ = dH W1, by row
#include "checks/check.h"
#include "cuda/low_rank.h"

namespace guild::cuda {

void up_gradient(UpGradient const& x, Queue queue) {
  check(x);
  require_layer(x.sizes, x.dtype);
  require_aligned(x.dh, "dh");
  require_aligned(x.dx, "dx");
  auto const view = gate_up_view(x.w_up, x.sizes, x.gated, x.order, element_bytes(x.dtype), "w_up");
  for (ConstWeight const& w : view.w) require_aligned(w, "w_up");
  Sizes const& s = x.sizes;
  row_product({.dtype = x.dtype,
               .rows = s.rows(),
               .n = s.hidden,
               .k = view.width,
               .groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
               .a = x.dh,
               .halves = view.halves,
               .w = {transposed(view.w[0]), transposed(view.w[1])},
               .low_rank = low_rank_operand(x.low_rank, transposed(view.w[0])),
               .bias = {},
               .d = x.dx,
               .direct = {}},
              queue);
}

}  // namespace guild::cuda
