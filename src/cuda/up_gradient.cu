// dX~ = dH W1, by row
#include "checks/check.h"
#include "cuda/low_rank.h"
#include "cuda/require_runnable.h"

namespace guild::cuda {
namespace {

GateUpView<ConstWeight> view_of(UpGradient const& x) {
  return gate_up_view(x.w_up, x.sizes, x.gated, x.order, element_bytes(x.dtype), "w_up");
}

}  // namespace

void require_runnable(UpGradient const& x) {
  check(x);
  require_layer(x.sizes, x.dtype);
  require_aligned(x.dh, "dh");
  require_aligned(x.dx, "dx");
  auto const view = view_of(x);
  for (ConstWeight const& w : view.w) require_aligned(w, "w_up");
  require_same_layout(view, "w_up");
  require_low_rank(x.low_rank, transposed(view.w[0]));
}

void up_gradient(UpGradient const& x, Queue queue) {
  require_runnable(x);
  auto const view = view_of(x);
  Sizes const& s = x.sizes;
  row_product({.dtype = x.dtype,
               .rows = s.rows(),
               .n = s.hidden,
               .k = view.width,
               .groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
               .a = x.dh,
               .halves = view.halves,
               .w = {transposed(view.w[0]), transposed(view.w[1])},
               .low_rank = low_rank_operand(x.low_rank),
               .bias = {},
               .d = x.dx,
               .direct = {}},
              queue);
}

}  // namespace guild::cuda
