// Checks of the arguments of routing and of the bare grouped product. See check.h.
#include <array>

#include "checks/conditions.h"
#include "shared/routing.h"

namespace guild {

namespace {

void check_router(Router const& router) {
  require(int(router.score) >= 0 && int(router.score) <= int(Score::sqrt_softplus),
          "router.score: expected 0 (softmax), 1 (sigmoid) or 2 (sqrt_softplus), got ",
          int(router.score));
  require(is_float32(router.scale),
          "router.scale: expected 0 or a number in float32's normal range, got ", router.scale);
  require(router.sum_floor >= 0 && is_float32(router.sum_floor),
          "router.sum_floor: expected 0 or a positive number in float32's normal range, got ",
          router.sum_floor);
  require(router.renormalize || router.sum_floor == 0,
          "router.sum_floor: expected 0 without renormalize, got ", router.sum_floor);
}

void check_groups(Router const& router, int64_t experts, int64_t top_k) {
  check_size(router.groups, 1, kMostGroups, "router.groups");
  require(experts % router.groups == 0, "router.groups: expected a divisor of ", experts,
          " (experts), got ", router.groups);
  check_size(router.top_groups, 1, router.groups, "router.top_groups");
  require(router.group_score == GroupScore::top2_sum || router.group_score == GroupScore::max,
          "router.group_score: expected 0 (top2_sum) or 1 (max), got ", int(router.group_score));
  int64_t const candidates = experts / router.groups * router.top_groups;
  require(candidates >= top_k, "router.top_groups: expected groups of at least ", top_k,
          " experts (top_k), got ", router.top_groups, " of ", experts / router.groups);
}

void check_slots(int64_t tokens, int64_t experts, int64_t top_k, bool distinct) {
  check_size(tokens, 0, kMostRows, "tokens");
  check_size(experts, 1, kMostExperts, "experts");
  check_size(top_k, 1, distinct ? experts : kMostExperts, "top_k");
  check_size(tokens * top_k, 0, kMostRows, "tokens * top_k");
}

void check_sequences(int64_t tokens, int64_t sequences) {
  check_size(sequences, 1, most_sequences(tokens), "sequences");
  require(tokens % sequences == 0, "sequences: expected a divisor of ", tokens, " (tokens), got ",
          sequences);
}

// Returns the operand's dimensions.
std::array<Dimension, 3> check_operand(GroupedGemm::Operand const& o, int64_t groups, int64_t rows,
                                       int64_t columns, char const* name) {
  int64_t const elements = rows * columns;
  require(o.data != nullptr || elements == 0, name, ": expected ", elements, " elements, got null");
  require(o.group_stride >= 0 && o.row_stride >= 0 && o.col_stride >= 0, name,
          ": expected strides of at least 0, got (", o.group_stride, ", ", o.row_stride, ", ",
          o.col_stride, ")");
  std::array<Dimension, 3> const places{{matrices(groups, o.group_stride, o.group_at),
                                         {rows, o.row_stride},
                                         {columns, o.col_stride}}};
  check_reach(places, name);
  return places;
}

// Checks an argument that only some routers have: required with them, null with all others.
void check_with(bool has, void const* data, bool any, char const* name, char const* routers) {
  require(has || data == nullptr, name, ": expected null unless the router is ", routers);
  require(!has || data != nullptr || !any, name, ": expected a pointer with ", routers,
          ", got null");
}

}  // namespace

void check(Route const& x) {
  check_slots(x.tokens, x.experts, x.top_k, true);
  check_score_dtype(x.dtype, "dtype");
  check_router(x.router);
  check_groups(x.router, x.experts, x.top_k);
  check_rows(x.logits, x.tokens, x.experts, "logits");
  check_pointer(x.ids, x.tokens > 0, "ids");
  check_pointer(x.scores, x.tokens > 0, "scores");
  check_with(has_slopes(x.router), x.slopes, false, "slopes", "a sigmoid or sqrt_softplus");
}

void check(RouterGradient const& x) {
  check_slots(x.tokens, x.experts, x.top_k, false);
  check_lists(x.slots, x.token_offsets);
  check_score_dtype(x.dtype, "dtype");
  check_router(x.router);
  bool const any = slot_count(x) > 0;
  check_pointer(x.ids, any, "ids");
  check_pointer(x.scores, any, "scores");
  check_pointer(x.dscores, any, "dscores");
  check_with(has_slopes(x.router), x.slopes, any, "slopes", "a sigmoid or sqrt_softplus");
  check_with(needs_logits(x.router), x.logits.data, any, "logits",
             "a softmax, not renormalised, or one with a sum_floor");
  check_optional_rows(x.logits, x.tokens, x.experts, "logits");
  check_rows(x.dlogits, x.tokens, x.experts, "dlogits");
  bool const narrow = x.rounded_to == DType::bfloat16 || x.rounded_to == DType::float16;
  require(x.rounded_to == DType::float32 || (narrow && x.dtype == DType::float32),
          "rounded_to: expected float32", x.dtype == DType::float32 ? ", bfloat16 or float16" : "",
          ", got ", name_of(x.rounded_to));
}

void check(TokenRounding const& x) {
  check_slots(x.tokens, x.experts, x.top_k, false);
  check_score_dtype(x.dtype, "dtype");
  check_router(x.router);
  int64_t const slots = rounded_slots(x.tokens, x.experts, x.top_k, x.rounding, x.tile);
  check_size(slots, 0, kMostRows, "tokens * top_k rounded to tiles");
  bool const any = x.tokens > 0;
  check_rows(x.logits, x.tokens, x.experts, "logits");
  check_pointer(x.ids, any, "ids");
  bool const stochastic = x.rounding == Rounding::stochastic;
  require(stochastic || x.seed == nullptr,
          "seed: expected null unless rounding is stochastic, got a pointer");
  check_pointer(x.seed, stochastic, "seed");
  check_pointer(x.token_offsets, true, "token_offsets");
  check_pointer(x.list_ids, any, "list_ids");
  check_pointer(x.scores, any, "scores");
  check_with(has_slopes(x.router), x.slopes, false, "slopes", "a sigmoid or sqrt_softplus");
  int64_t const bytes = any ? rounding_workspace_bytes(x.tokens, x.experts) : 0;
  check_workspace(x.workspace, bytes);
}

void check(BalanceSums const& x) {
  check_slots(x.tokens, x.experts, x.top_k, false);
  check_sequences(x.tokens, x.sequences);
  check_score_dtype(x.dtype, "dtype");
  check_router({.score = x.score});
  bool const any = x.tokens > 0;
  check_rows(x.logits, x.tokens, x.experts, "logits");
  check_pointer(x.ids, any, "ids");
  check_pointer(x.shares, true, "shares");
  check_pointer(x.squares, true, "squares");
  check_pointer(x.counts, true, "counts");
  check_workspace(x.workspace, balance_workspace_bytes(x.tokens, x.experts, x.sequences));
}

void check(BalanceGradient const& x) {
  check_slots(x.tokens, x.experts, 1, false);
  check_sequences(x.tokens, x.sequences);
  check_score_dtype(x.dtype, "dtype");
  check_router({.score = x.score});
  check_rows(x.logits, x.tokens, x.experts, "logits");
  check_pointer(x.dshares, true, "dshares");
  check_pointer(x.dsquares, true, "dsquares");
  check_rows(x.dlogits, x.tokens, x.experts, "dlogits");
}

void check(Sort const& x) {
  check_slots(x.tokens, x.experts, x.top_k, false);
  check_lists(x.slots, x.token_offsets);
  check_score_dtype(x.score_dtype, "score_dtype");
  check_size(x.room, -1, kMostRows, "room");
  int64_t const slots = slot_count(x);
  bool const any = slots > 0, rows = row_count(x) > 0;
  check_pointer(x.ids, any, "ids");
  check_pointer(x.offsets, true, "offsets");
  check_pointer(x.row_token, rows, "row_token");
  check_pointer(x.slot_row, any, "slot_row");
  check_pointer(x.row_score, rows && x.scores != nullptr, "row_score");
  check_workspace(x.workspace, sort_workspace_bytes(slots, x.experts, 1));
}

void check(GroupedGemm const& x) {
  using Ragged = GroupedGemm::Ragged;
  require(int(x.ragged) >= 0 && int(x.ragged) <= int(Ragged::none),
          "ragged: expected 0 (rows), 1 (inner), 2 (columns) or 3 (none), got ", int(x.ragged));
  check_size(x.m, 0, kMostRows, "m");
  check_size(x.n, 0, kMostRows, "n");
  check_size(x.k, 0, kMostRows, "k");
  check_size(x.groups, 1, kMostExperts, "groups");
  check_dtype(x.dtype, "dtype");
  check_gradient_dtype(x.out_dtype, x.dtype, "out_dtype");
  bool const ragged = x.ragged != Ragged::none;
  check_pointer(x.offsets, ragged, "offsets");
  require(ragged || x.offsets == nullptr, "offsets: expected null where no dimension is ragged");
  bool const stacked = x.ragged == Ragged::inner || x.ragged == Ragged::none;
  bool const a_stacked = x.ragged == Ragged::columns || x.ragged == Ragged::none;
  bool const b_stacked = x.ragged == Ragged::rows || x.ragged == Ragged::none;
  check_operand(x.a, a_stacked ? x.groups : 1, x.m, x.k, "a");
  check_operand(x.b, b_stacked ? x.groups : 1, x.k, x.n, "b");
  require(lie_apart(check_operand(x.d, stacked ? x.groups : 1, x.m, x.n, "d")),
          "d: expected strides of an output that does not overlap, got (", x.d.group_stride, ", ",
          x.d.row_stride, ", ", x.d.col_stride, ")");
  check_optional_rows(x.bias, x.groups, x.ragged == Ragged::columns ? x.m : x.n, "bias");
}

}  // namespace guild
