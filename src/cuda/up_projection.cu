// H = X[row_token] W1^T + b1;  A = activation(H)
#include "checks/check.h"
#include "cuda/low_rank.h"
#include "cuda/require_runnable.h"

namespace guild::cuda {
namespace {

GateUpView<ConstWeight> view_of(UpProjection const& x) {
  return gate_up_view(x.w_up, x.sizes, x.activation.gated, x.order, element_bytes(x.dtype), "w_up");
}

}  // namespace

void require_runnable(UpProjection const& x) {
  check(x);
  require_layer(x.sizes, x.dtype);
  auto const view = view_of(x);
  for (ConstWeight const& w : view.w) require_aligned(w, "w_up");
  require_same_layout(view, "w_up");
  require_aligned(x.x, "x");
  if (x.routing.row_token != nullptr) {
    require_addressable(x.x, x.sizes.tokens, x.sizes.hidden, "x");
  }
  require_aligned(x.bias, "b_up");
  require_aligned(x.h, "h");
  require_aligned(x.a, "a");
  require_low_rank(x, view.w[0]);
}

void up_projection(UpProjection const& x, Queue queue) { up_projection(x, {}, {}, queue); }

void up_projection(UpProjection const& x, InForward const& forward, SharedUp const& shared,
                   Queue const& queue) {
  require_runnable(x);
  auto const view = view_of(x);
  Sizes const& s = x.sizes;
  up_product({.dtype = x.dtype,
              .rows = s.rows(),
              .tokens = s.tokens,
              .n = s.intermediate,
              .k = s.hidden,
              .groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
              .a = x.x,
              .row_token = x.routing.row_token,
              .pairing = view.pairing,
              .w = {view.w[0], view.w[1]},
              .bias = x.bias,
              .activation = x.activation,
              .h = x.h,
              .h_rows = x.h_rows,
              .activated = x.a,
              .short_lived = forward.short_lived,
              .low_rank = low_rank_operand(x),
              .sort = forward.sort,
              .choice = forward.choice,
              .after_pull = x.after_pull,
              .shared = shared},
             queue);
}

}  // namespace guild::cuda
