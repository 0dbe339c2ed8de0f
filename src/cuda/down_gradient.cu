// With g = dO[row_token] W2: dH = d activation(s g, H), A' = s A, parts of dS = <g, A>; where they
// are wanted, db1 and db2 from sums over 64 rows each
#include "checks/check.h"
#include "cuda/low_rank.h"
#include "cuda/require_runnable.h"
#include "cuda/rows/bias_sums.h"

namespace guild::cuda {

void require_runnable(DownGradient const& x) {
  check(x);
  require_layer(x.sizes, x.dtype);
  require_aligned(x.w_down, "w_down");
  require_aligned(x.dout, "dout");
  if (x.routing.row_token != nullptr) {
    require_addressable(x.dout, x.sizes.tokens, x.sizes.hidden, "dout");
  }
  require_aligned(x.h, "h");
  require_aligned(x.h_again, "h_again");
  require_aligned(x.dh, "dh");
  require_aligned(x.a_scaled, "a_scaled");
  require_low_rank(x.low_rank, transposed(x.w_down));
}

void down_gradient(DownGradient const& x, Queue queue) {
  require_runnable(x);
  Carver carver(x.workspace);
  Sizes const& s = x.sizes;
  BiasSums const sums = carve_bias_sums(carver, s, x.activation.gated);
  auto const wanted = [](Rows const& db, void* sum) {
    return static_cast<float*>(db.data != nullptr ? sum : nullptr);
  };
  down_gradient_product({.dtype = x.dtype,
                         .rows = s.rows(),
                         .tokens = s.tokens,
                         .n = s.intermediate,
                         .k = s.hidden,
                         .groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
                         .a = x.dout,
                         .row_token = x.routing.row_token,
                         .w = transposed(x.w_down),
                         .score = static_cast<float const*>(x.routing.row_score),
                         .pairing = pairing_of(x.activation.gated, x.order),
                         .activation = x.activation,
                         .h = x.h,
                         .h_again = x.h_again,
                         .h_rows = x.h_rows,
                         .needed = x.needed,
                         .dh = x.dh,
                         .scaled = x.a_scaled,
                         .score_parts = static_cast<float*>(x.score_parts),
                         .dh_sums = wanted(x.db_up, sums.dh),
                         .a_sums = wanted(x.db_down, sums.dout),
                         .low_rank = low_rank_operand(x.low_rank)},
                        queue);
  if (wants_biases(x)) add_bias_sums(x, sums, queue);
}

}  // namespace guild::cuda
