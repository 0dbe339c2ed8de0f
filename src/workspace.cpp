// Sizes of the work buffers that callers provide.
#include <algorithm>

#include "compose.h"
#include "shared/balancing.h"
#include "shared/gemm_config.h"
#include "shared/rounding_workspace.h"
#include "shared/sorting.h"
#include "shared/tiles.h"

namespace guild {

int64_t score_parts(Sizes const& sizes) { return pieces(sizes.intermediate, kScoreColumns); }

int64_t sort_workspace_bytes(int64_t tokens, int64_t experts, int64_t top_k) {
  Carver carver(nullptr);
  carver.take(sort_histograms(tokens * top_k) * experts * int64_t(sizeof(int32_t)));
  return carver.used();
}

int64_t rounding_workspace_bytes(int64_t tokens, int64_t experts) {
  Carver carver(nullptr);
  carve_rounding(carver, tokens, experts);
  return carver.used();
}

int64_t rounded_slots(int64_t tokens, int64_t experts, int64_t top_k, Rounding rounding,
                      int64_t tile) {
  int64_t more = 0;  // of all experts together
  if (rounding == Rounding::nearest) more = experts * (tile / 2);
  if (rounding == Rounding::balanced) more = tile / 2;
  if (rounding == Rounding::up || rounding == Rounding::stochastic) more = experts * (tile - 1);
  return std::min(tokens * std::max(experts, top_k), tokens * top_k + more);
}

int64_t balance_workspace_bytes(int64_t tokens, int64_t experts, int64_t sequences) {
  Carver carver(nullptr);
  carve_balance(carver, tokens, experts, sequences);
  return carver.used();
}

int64_t down_gradient_workspace_bytes(Sizes const& sizes, bool gated) {
  Carver carver(nullptr);
  carve_bias_sums(carver, sizes, gated);
  return carver.used();
}

int64_t moe_forward_workspace_bytes(Sizes const& sizes, DType dtype) {
  Carver carver(nullptr);
  carve_forward(carver, sizes, dtype);
  return carver.used();
}

int64_t moe_backward_workspace_bytes(Sizes const& sizes, DType dtype, bool gated, bool combines,
                                     bool biases) {
  Carver carver(nullptr);
  carve_backward(carver, sizes, dtype, gated, combines, biases);
  return carver.used();
}

}  // namespace guild
