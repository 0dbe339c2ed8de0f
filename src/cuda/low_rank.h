// Low-rank terms of the steps as the GPU's products take them.
#pragma once
#include "cuda/gate_up.h"

namespace guild::cuda {

// Whether B has the contiguous dimension that the kernel of this weight reads.
inline void require_like(ConstWeight const& b, ConstWeight const& w) {
  bool const by_in = w.in_stride == 1 && w.out_stride != 1;
  require((by_in ? b.in_stride : b.out_stride) == 1,
          "low_rank.b: expected the contiguous dimension that the weight has on CUDA, strides (",
          w.expert_stride, ", ", w.out_stride, ", ", w.in_stride, "), got (", b.expert_stride, ", ",
          b.out_stride, ", ", b.in_stride, ")");
  require_aligned(b, "low_rank.b");
}

// weight: (E, n, k) as (out, in).
inline void require_low_rank(LowRankTerm<ConstWeight> const& term, ConstWeight const& weight) {
  if (term.rank == 0) return;
  require_whole_16_bytes(term.rank, "low_rank.rank");
  require_aligned(term.t, "low_rank.t");
  require_like(term.b, weight);
}

inline LowRankOperand low_rank_operand(LowRankTerm<ConstWeight> const& term) {
  if (term.rank == 0) return {};
  return {.t = term.t, .b = {term.b, term.b}, .rank = term.rank};
}

// The two halves of B, of a term that there is.
inline GateUpView<ConstWeight> low_rank_view(UpProjection const& x) {
  Sizes narrow = x.sizes;
  narrow.hidden = x.low_rank.rank;
  return gate_up_view(x.low_rank.b, narrow, x.activation.gated, x.order, element_bytes(x.dtype),
                      "low_rank.b");
}

inline void require_low_rank(UpProjection const& x, ConstWeight const& weight) {
  auto const& term = x.low_rank;
  if (term.rank == 0) return;
  require_whole_16_bytes(term.rank, "low_rank.rank");
  require_aligned(term.t, "low_rank.t");
  for (ConstWeight const& b : low_rank_view(x).w) require_like(b, weight);
}

inline LowRankOperand low_rank_operand(UpProjection const& x) {
  if (x.low_rank.rank == 0) return {};
  auto const view = low_rank_view(x);
  return {.t = x.low_rank.t, .b = {view.w[0], view.w[1]}, .rank = x.low_rank.rank};
}

}  // namespace guild::cuda
