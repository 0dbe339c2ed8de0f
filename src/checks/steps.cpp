// Checks of the arguments of a layer's steps. See check.h; those of routing and of the bare grouped
// product are in routing.cpp.
#include "checks/check.h"

#include "checks/conditions.h"
#include "compose.h"

namespace guild {

namespace {

template <class W>
void check_up_weight(GatedWeight<W> const& w, Sizes const& s, bool gated, char const* gate_name,
                     char const* up_name, bool output) {
  check_weight(w.gate, s.experts, s.intermediate, s.hidden, gate_name, output);
  if (gated) check_weight(w.up, s.experts, s.intermediate, s.hidden, up_name, output);
  require(!output || !gated || w.gate.data != w.up.data, up_name, ": expected other memory than ",
          gate_name, "'s, got the same");
}

void check_term(ConstRows const& t, Sizes const& s, int64_t rank) {
  check_size(rank, 0, kMostColumns, "low_rank.rank");
  if (rank > 0) check_rows(t, s.rows(), rank, "low_rank.t");
}

void check_low_rank(LowRankTerm<ConstWeight> const& term, Sizes const& s, int64_t out) {
  check_term(term.t, s, term.rank);
  if (term.rank > 0) check_weight(term.b, s.experts, out, term.rank, "low_rank.b", false);
}

// Whether either half of the up projection's gradient is wanted: check_up_weight asks for both.
bool wants_up(UpWeight const& dw, bool gated) {
  return dw.gate.data != nullptr || (gated && dw.up.data != nullptr);
}

}  // namespace

void check(UpProjection const& x) {
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  check_layer(s, x.dtype, x.routing);
  check_activation(x.activation, x.dtype);
  check_order(x.order);
  check_rows(x.x, input_rows(s, x.routing), s.hidden, "x");
  check_up_weight(x.w_up, s, gated, "w_up.gate", "w_up.up", false);
  check_optional_rows(x.bias, s.experts, width(s, gated), "bias");
  check_optional_rows(x.h, s.rows(), width(s, gated), "h");
  check_size(x.h_rows, -1, s.rows(), "h_rows");
  check_rows(x.a, s.rows(), s.intermediate, "a");
  check_term(x.low_rank.t, s, x.low_rank.rank);
  if (x.low_rank.rank == 0) return;
  Sizes narrow = s;
  narrow.hidden = x.low_rank.rank;
  check_up_weight(x.low_rank.b, narrow, gated, "low_rank.b.gate", "low_rank.b.up", false);
}

void check(DownProjection const& x) {
  Sizes const& s = x.sizes;
  check_layer(s, x.dtype, x.routing);
  check_rows(x.a, s.rows(), s.intermediate, "a");
  check_weight(x.w_down, s.experts, s.hidden, s.intermediate, "w_down", false);
  check_optional_rows(x.bias, s.experts, s.hidden, "bias");
  check_rows(x.y, s.rows(), s.hidden, "y");
  check_low_rank(x.low_rank, s, s.hidden);
}

void check(Combine const& x) {
  Sizes const& s = x.sizes;
  check_sizes(s);
  check_dtype(x.dtype, "dtype");
  check_lists(s.slots, x.routing.token_offsets);
  check_pointer(x.routing.slot_row, s.slot_count() > 0, "routing.slot_row");
  check_rows(x.y, s.rows(), s.hidden, "y");
  check_rows(x.o, s.tokens, s.hidden, "o");
  check_optional_rows(x.residual, s.tokens, s.hidden, "residual");
  require(x.residual_scale == nullptr || x.residual.data != nullptr,
          "residual_scale: expected null without a residual, got a pointer");
  if (x.router.dlogits.data == nullptr) return;
  require(x.residual_scale == nullptr,
          "residual_scale: expected null with a router part, got a pointer");
  require(x.routing.slot_score == nullptr,
          "routing.slot_score: expected null with a router part, got a pointer");
  check_optional_rows(x.router.dlogits, s.tokens, s.experts, "router.dlogits");
  check_pointer(x.router.ids, s.slot_count() > 0, "router.ids");
  check_rows(x.router.weight, s.experts, s.hidden, "router.weight");
}

void check(DownGradient const& x) {
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  check_layer(s, x.dtype, x.routing);
  check_activation(x.activation, x.dtype);
  check_order(x.order);
  check_rows(x.dout, input_rows(s, x.routing), s.hidden, "dout");
  check_weight(x.w_down, s.experts, s.hidden, s.intermediate, "w_down", false);
  check_rows(x.h, s.rows(), width(s, gated), "h");
  check_rows(x.dh, s.rows(), width(s, gated), "dh");
  check_optional_rows(x.a_scaled, s.rows(), s.intermediate, "a_scaled");
  check_low_rank(x.low_rank, s, s.intermediate);
  require(x.low_rank.rank == 0 || x.db_down.data == nullptr,
          "db_down: expected null with a low-rank term, got a pointer");
  check_optional_rows(x.h_again, s.rows(), width(s, gated), "h_again");
  bool const again = x.h_again.data != nullptr;
  check_size(x.h_rows, again ? 0 : -1, again ? s.rows() : -1, "h_rows");
  require(again == (x.needed != nullptr), "needed: expected ",
          again ? "a pointer with h_again, got null" : "null without h_again, got a pointer");
  if (!wants_biases(x)) return;
  check_gradient_dtype(x.db_dtype, x.dtype, "db_dtype");
  check_optional_rows(x.db_up, s.experts, width(s, gated), "db_up");
  check_optional_rows(x.db_down, s.experts, s.hidden, "db_down");
  check_workspace(x.workspace, down_gradient_workspace_bytes(s, gated));
}

void check(ScoreGradient const& x) {
  Sizes const& s = x.sizes;
  check_sizes(s);
  check_dtype(x.dtype, "dtype");
  bool const any = s.slot_count() > 0;
  check_lists(s.slots, x.routing.token_offsets);
  check_pointer(x.routing.slot_row, any, "routing.slot_row");
  check_pointer(x.score_parts, s.rows() > 0, "score_parts");
  check_pointer(x.dscores, any, "dscores");
  if (x.bias.data == nullptr) return;
  check_pointer(x.routing.offsets, true, "routing.offsets");
  check_optional_rows(x.bias, s.experts, s.hidden, "bias");
  check_rows(x.dout, s.tokens, s.hidden, "dout");
}

void check(UpGradient const& x) {
  Sizes const& s = x.sizes;
  check_layer(s, x.dtype, x.routing);
  check_order(x.order);
  check_rows(x.dh, s.rows(), width(s, x.gated), "dh");
  check_up_weight(x.w_up, s, x.gated, "w_up.gate", "w_up.up", false);
  check_rows(x.dx, s.rows(), s.hidden, "dx");
  check_low_rank(x.low_rank, s, s.hidden);
}

void check(UpWeightGradient const& x) {
  Sizes const& s = x.sizes;
  check_layer(s, x.dtype, x.routing);
  check_gradient_dtype(x.dw_dtype, x.dtype, "dw_dtype");
  check_order(x.order);
  check_rows(x.x, input_rows(s, x.routing), s.hidden, "x");
  check_rows(x.dh, s.rows(), width(s, x.gated), "dh");
  check_up_weight(x.dw, s, x.gated, "dw.gate", "dw.up", true);
}

void check(DownWeightGradient const& x) {
  Sizes const& s = x.sizes;
  check_layer(s, x.dtype, x.routing);
  check_gradient_dtype(x.dw_dtype, x.dtype, "dw_dtype");
  check_rows(x.dout, input_rows(s, x.routing), s.hidden, "dout");
  check_rows(x.a, s.rows(), s.intermediate, "a");
  check_weight(x.dw, s.experts, s.hidden, s.intermediate, "dw", true);
}

void check(BiasGradient const& x) {
  check_size(x.rows, 0, kMostRows, "rows");
  check_size(x.width, 1, kMostColumns, "width");
  check_size(x.experts, 1, kMostExperts, "experts");
  check_dtype(x.dtype, "dtype");
  check_gradient_dtype(x.db_dtype, x.dtype, "db_dtype");
  check_pointer(x.routing.offsets, true, "routing.offsets");
  bool const gathered = x.routing.row_token != nullptr;
  check_size(x.tokens, gathered ? 0 : -1, kMostRows, "tokens");
  check_rows(x.m, gathered ? x.tokens : x.rows, x.width, "m");
  check_rows(x.db, x.experts, x.width, "db");
}

namespace {

// The sort must fill the same arrays that the layer reads.
void check_sort_of(Sort const& sort, MoeForward const& x) {
  check(sort);
  Routing const& r = x.routing;
  auto const expect = [](char const* name, int64_t got, int64_t of_layer) {
    require(got == of_layer, "sort.", name, ": expected ", of_layer, " as in sizes, got ", got);
  };
  expect("tokens", sort.tokens, x.sizes.tokens);
  expect("experts", sort.experts, x.sizes.experts);
  expect("top_k", sort.top_k, x.sizes.top_k);
  expect("slots", sort.slots, x.sizes.slots);
  expect("room", sort.room, x.sizes.room);
  require(sort.offsets == r.offsets && sort.row_token == r.row_token &&
              sort.slot_row == r.slot_row && sort.row_score == r.row_score &&
              sort.token_offsets == r.token_offsets,
          "sort: expected routing's arrays as its outputs");
  require(r.row_score == nullptr || sort.scores != nullptr,
          "sort.scores: expected a pointer with routing.row_score, got null");
  require(r.row_score == nullptr || sort.scores == r.slot_score,
          "sort.scores: expected routing.slot_score with routing.row_score, got another pointer");
  require(sort.scores == nullptr || sort.score_dtype == score_dtype(x.dtype),
          "sort.score_dtype: expected ", name_of(score_dtype(x.dtype)), " like the layer, got ",
          name_of(sort.score_dtype));
}

}  // namespace

void check(MoeForward const& x) {
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  check_layer(s, x.dtype, x.routing);
  check_places(s, x.routing);
  bool const unweighted = x.routing.slot_score == nullptr && s.rows() > 0;
  require(x.routing.row_score == nullptr || !unweighted || !has_slots(x.routing),
          "routing.slot_score: expected a pointer with row_score, got null");
  check_activation(x.activation, x.dtype);
  check_order(x.order);
  check_rows(x.x, input_rows(s, x.routing), s.hidden, "x");
  check_up_weight(x.w_up, s, gated, "w_up.gate", "w_up.up", false);
  check_weight(x.w_down, s.experts, s.hidden, s.intermediate, "w_down", false);
  check_optional_rows(x.b_up, s.experts, width(s, gated), "b_up");
  check_optional_rows(x.b_down, s.experts, s.hidden, "b_down");
  check_optional_rows(x.h, s.rows(), width(s, gated), "h");
  check_rows(x.o, has_slots(x.routing) ? s.tokens : s.rows(), s.hidden, "o");
  require(x.residual.data == nullptr || has_slots(x.routing),
          "residual: expected null where rows are not combined, got a pointer");
  require(x.residual_scale == nullptr || x.residual.data != nullptr,
          "residual_scale: expected null without a residual, got a pointer");
  check_optional_rows(x.residual, s.tokens, s.hidden, "residual");
  check_workspace(x.workspace, moe_forward_workspace_bytes(s, x.dtype));
  if (x.sort != nullptr) check_sort_of(*x.sort, x);
}

void check(MoeBackward const& x) {
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  check_layer(s, x.dtype, x.routing);
  check_places(s, x.routing);
  require(x.routing.slot_score == nullptr || x.routing.row_score != nullptr || s.rows() == 0,
          "routing.row_score: expected a pointer with slot_score, got null");
  check_gradient_dtype(x.dw_dtype, x.dtype, "dw_dtype");
  check_activation(x.activation, x.dtype);
  check_order(x.order);
  check_rows(x.dout, input_rows(s, x.routing), s.hidden, "dout");
  if (wants_up(x.dw_up, gated)) check_rows(x.x, input_rows(s, x.routing), s.hidden, "x");
  check_rows(x.h, s.rows(), width(s, gated), "h");
  check_up_weight(x.w_up, s, gated, "w_up.gate", "w_up.up", false);
  check_weight(x.w_down, s.experts, s.hidden, s.intermediate, "w_down", false);
  check_optional_rows(x.b_down, s.experts, s.hidden, "b_down");
  check_optional_rows(x.dx, has_slots(x.routing) ? s.tokens : s.rows(), s.hidden, "dx");
  check_optional_rows(x.dx_rows, s.rows(), s.hidden, "dx_rows");
  require(x.dx.data == nullptr || x.dx_rows.data == nullptr,
          "dx_rows: expected null with dx, got a pointer");
  if (wants_up(x.dw_up, gated)) {
    check_up_weight(x.dw_up, s, gated, "dw_up.gate", "dw_up.up", true);
  }
  if (x.dw_down.data != nullptr) {
    check_weight(x.dw_down, s.experts, s.hidden, s.intermediate, "dw_down", true);
  }
  check_optional_rows(x.db_up, s.experts, width(s, gated), "db_up");
  check_optional_rows(x.db_down, s.experts, s.hidden, "db_down");
  if (x.dscores != nullptr) {
    check_pointer(x.routing.slot_row, s.slot_count() > 0, "routing.slot_row");
    // The score gradient needs a row of dout per token even if there is no room for rows (R = 0).
    if (x.b_down.data != nullptr) check_rows(x.dout, s.tokens, s.hidden, "dout");
  }
  check_optional_rows(x.dh, s.rows(), width(s, gated), "dh");
  check_optional_rows(x.a_scaled, s.rows(), s.intermediate, "a_scaled");
  bool const keeps = x.dh.data != nullptr;
  require(keeps == (x.a_scaled.data != nullptr), keeps ? "a_scaled" : "dh",
          ": expected a buffer with ", keeps ? "dh" : "a_scaled", ", got null");
  check_workspace(x.workspace, moe_backward_workspace_bytes(s, x.dtype, gated, combines_rows(x),
                                                            wants_biases(x), keeps));
}

void check(MoeWeightGradients const& x) {
  Sizes const& s = x.sizes;
  check_layer(s, x.dtype, x.routing);
  check_gradient_dtype(x.dw_dtype, x.dtype, "dw_dtype");
  check_order(x.order);
  if (wants_up(x.dw_up, x.gated)) {
    check_rows(x.x, input_rows(s, x.routing), s.hidden, "x");
    check_rows(x.dh, s.rows(), width(s, x.gated), "dh");
    check_up_weight(x.dw_up, s, x.gated, "dw_up.gate", "dw_up.up", true);
  }
  if (x.dw_down.data != nullptr) {
    check_rows(x.dout, input_rows(s, x.routing), s.hidden, "dout");
    check_rows(x.a_scaled, s.rows(), s.intermediate, "a_scaled");
    check_weight(x.dw_down, s.experts, s.hidden, s.intermediate, "dw_down", true);
  }
  check_workspace(x.workspace, moe_weight_gradients_workspace_bytes(s));
}

}  // namespace guild
