// Sizes of the work buffers that callers provide.
#include <algorithm>

#include "checks/conditions.h"
#include "compose.h"
#include "shared/balancing.h"
#include "shared/gemm_config.h"
#include "shared/rounding_workspace.h"
#include "shared/sorting.h"
#include "shared/tiles.h"
#include "shared/workspace.h"

namespace guild {

namespace {

// The steps' own conditions, except that sizes may be zero: such a layer needs no memory.
void check_layer_sizes(Sizes const& s) {
  check_size(s.tokens, 0, kMostRows, "tokens");
  check_size(s.hidden, 0, kMostColumns, "hidden");
  check_size(s.intermediate, 0, kMostColumns, "intermediate");
  check_size(s.experts, 0, kMostExperts, "experts");
  check_size(s.top_k, 0, kMostExperts, "top_k");
  check_size(s.slots, -1, kMostRows, "slots");
  check_size(s.slot_count(), 0, kMostRows, s.slots < 0 ? "tokens * top_k" : "slots");
  check_size(s.room, -1, kMostRows, "room");
}

void check_router_sizes(int64_t tokens, int64_t experts, int64_t top_k) {
  check_size(tokens, 0, kMostRows, "tokens");
  check_size(experts, 0, kMostExperts, "experts");
  check_size(top_k, 0, kMostExperts, "top_k");
  check_size(tokens * top_k, 0, kMostRows, "tokens * top_k");
}

}  // namespace

int64_t score_parts(Sizes const& sizes) {
  check_size(sizes.intermediate, 0, kMostColumns, "intermediate");
  return ceil_div(sizes.intermediate, kScoreColumns);
}

int64_t sort_workspace_bytes(int64_t tokens, int64_t experts, int64_t top_k) {
  check_router_sizes(tokens, experts, top_k);
  Carver carver(nullptr);
  carver.take(sort_histograms(tokens * top_k), experts, sizeof(int32_t));
  return carver.used();
}

int64_t rounding_workspace_bytes(int64_t tokens, int64_t experts) {
  check_router_sizes(tokens, experts, 1);
  Carver carver(nullptr);
  carve_rounding(carver, tokens, experts);
  return carver.used();
}

int64_t rounded_slots(int64_t tokens, int64_t experts, int64_t top_k, Rounding rounding,
                      int64_t tile) {
  check_router_sizes(tokens, experts, top_k);
  check_size(int64_t(rounding), 0, int64_t(Rounding::balanced), "rounding");
  check_size(tile, 1, kMostTile, "tile");
  int64_t more = 0;  // of all experts together
  if (rounding == Rounding::nearest) more = experts * (tile / 2);
  if (rounding == Rounding::balanced) more = tile / 2;
  if (rounding == Rounding::up || rounding == Rounding::stochastic) more = experts * (tile - 1);
  return std::min(tokens * std::max(experts, top_k), tokens * top_k + more);
}

int64_t balance_workspace_bytes(int64_t tokens, int64_t experts, int64_t sequences) {
  check_router_sizes(tokens, experts, 1);
  check_size(sequences, 1, most_sequences(tokens), "sequences");
  Carver carver(nullptr);
  carve_balance(carver, tokens, experts, sequences);
  return carver.used();
}

int64_t down_gradient_workspace_bytes(Sizes const& sizes, bool gated) {
  check_layer_sizes(sizes);
  Carver carver(nullptr);
  carve_bias_sums(carver, sizes, gated);
  return carver.used();
}

int64_t moe_forward_workspace_bytes(Sizes const& sizes, DType dtype) {
  check_layer_sizes(sizes);
  check_dtype(dtype, "dtype");
  Carver carver(nullptr);
  carve_forward(carver, sizes, dtype);
  return carver.used();
}

int64_t moe_backward_workspace_bytes(Sizes const& sizes, DType dtype, bool gated, bool combines,
                                     bool biases, bool keeps) {
  check_layer_sizes(sizes);
  check_dtype(dtype, "dtype");
  Carver carver(nullptr);
  carve_backward(carver, sizes, dtype, gated,
                 {.combines = combines, .biases = biases, .keeps = keeps});
  return carver.used();
}

int64_t moe_weight_gradients_workspace_bytes(Sizes const& sizes) {
  check_layer_sizes(sizes);
  Carver carver(nullptr);
  carve_schedule(carver, sizes);
  return carver.used();
}

}  // namespace guild
