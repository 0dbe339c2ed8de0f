// Y = A W2^T + b2
#include "checks/check.h"
#include "cuda/low_rank.h"
#include "cuda/require_runnable.h"
#include "cuda/token_sum.h"

namespace guild::cuda {

void require_runnable(DownProjection const& x) {
  check(x);
  require_layer(x.sizes, x.dtype);
  require_aligned(x.w_down, "w_down");
  require_aligned(x.a, "a");
  require_aligned(x.bias, "b_down");
  require_aligned(x.y, "y");
  require_low_rank(x.low_rank, x.w_down);
}

void down_projection(DownProjection const& x, Queue queue) { down_projection(x, {}, {}, queue); }

void down_projection(DownProjection const& x, InForward const& forward, SharedRows const& shared,
                     Queue const& queue) {
  require_runnable(x);
  Sizes const& s = x.sizes;
  row_product({.dtype = x.dtype,
               .rows = s.rows(),
               .n = s.hidden,
               .k = s.intermediate,
               .groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
               .a = x.a,
               .w = {x.w_down, x.w_down},
               .low_rank = low_rank_operand(x.low_rank),
               .bias = x.bias,
               .d = x.y,
               .direct = {},
               .tokens = s.tokens,
               .sort = forward.sort,
               .after_up = x.after_up,
               .short_lived = forward.short_lived,
               .shared = shared},
              queue);
}

bool down_with_sum(DownProjection const& down, Combine const& sum, Sort const& sort,
                   SharedExpert const* shared, Queue const& queue) {
  Sizes const& s = down.sizes;
  if (shared != nullptr && shared->intermediate != s.intermediate) return false;
  if (down.low_rank.rank > 0 || sum.router.dlogits.data != nullptr) return false;
  return token_sum({.dtype = down.dtype,
                    .n = s.hidden,
                    .k = s.intermediate,
                    .sort = sort,
                    .a = down.a,
                    .w = down.w_down,
                    .bias = down.bias,
                    .score = static_cast<float const*>(sum.routing.slot_score),
                    .residual = shared != nullptr ? ConstRows{} : sum.residual,
                    .residual_scale = static_cast<float const*>(sum.residual_scale),
                    .o = sum.o,
                    .shared = shared != nullptr,
                    .shared_w = shared != nullptr ? shared->w_down : ConstWeight{}},
                   queue);
}

}  // namespace guild::cuda
