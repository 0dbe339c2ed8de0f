// route, its gradient and the sort by expert.
#include "torch/routing.h"

#include "shared/routing.h"
#include "torch/ops.h"

namespace guild::binding {

Score score_of(int64_t score) {
  require(score >= 0 && score <= int64_t(Score::sqrt_softplus),
          "score: expected 0 (softmax), 1 (sigmoid) or 2 (sqrt_softplus), got ", score);
  return Score(score);
}

namespace {

Router router_of(int64_t score, bool renormalize, double scale, double sum_floor) {
  Router router;
  router.score = score_of(score);
  router.renormalize = renormalize;
  router.scale = scale;
  router.sum_floor = sum_floor;
  return router;
}

Router router_of(RouterScalars const& given, int64_t experts) {
  Router router = router_of(given.score, given.renormalize, given.scale, given.sum_floor);
  require(given.group_score == 0 || given.group_score == 1,
          "group_score: expected 0 (top2_sum) or 1 (max), got ", given.group_score);
  router.group_score = GroupScore(given.group_score);
  require(given.groups >= 1 && given.groups <= experts, "groups: expected 1 to ", experts,
          " (experts), got ", given.groups);
  require(given.top_groups >= 1 && given.top_groups <= given.groups, "top_groups: expected 1 to ",
          given.groups, " (groups), got ", given.top_groups);
  router.groups = int(given.groups);
  router.top_groups = int(given.top_groups);
  return router;
}

}  // namespace

Route route_of(Place const& place, RouteSizes const& sizes, MaybeTensor const& selection_bias,
               MaybeTensor const& token_mask, RouterScalars const& router) {
  auto const [tokens, experts, top_k, dtype] = sizes;
  require(top_k >= 1 && top_k <= experts, "top_k: expected 1 to ", experts, " (experts), got ",
          top_k);
  Route args;
  args.tokens = tokens;
  args.experts = experts;
  args.top_k = top_k;
  args.dtype = dtype;
  args.router = router_of(router, experts);
  if (selection_bias.has_value()) {
    args.selection_bias = place.packed(*selection_bias, "selection_bias", dtype, {experts});
  }
  if (token_mask.has_value()) {
    args.token_mask = place.flags(*token_mask, "token_mask", {tokens});
  }
  return args;
}

Routed::Routed(Place const& place, RouteSizes const& sizes, MaybeTensor const& selection_bias,
               MaybeTensor const& token_mask, RouterScalars const& router)
    : args(route_of(place, sizes, selection_bias, token_mask, router)) {
  auto const [tokens, experts, top_k, dtype] = sizes;
  bool const sloped = has_slopes(args.router);
  ids = place.empty_int32({tokens, top_k});
  scores = place.empty({tokens, top_k}, dtype);
  slopes = place.empty({sloped ? tokens : 0, top_k}, dtype);
  args.ids = static_cast<int32_t*>(ids.data_ptr());
  args.scores = scores.data_ptr();
  args.slopes = sloped ? slopes.data_ptr() : nullptr;
}

Sorting sorting(Place const& place, Tensor const& ids, Tensor const& scores, int64_t experts,
                DType scores_dtype, MaybeTensor const& token_offsets, int64_t room) {
  Slots const slots = slots_of(place, ids, "ids", token_offsets);
  Sort args{.tokens = slots.tokens,
            .experts = experts,
            .top_k = slots.top_k,
            .score_dtype = scores_dtype,
            .slots = slots.count,
            .token_offsets = slots.token_offsets,
            .room = room};
  int64_t const rows = row_count(args);
  args.ids = slots.data(place, ids, "ids");
  require(ids.is_contiguous(), "ids: expected a contiguous tensor");
  args.ids_are_int64 = is_int64(ids, "ids");
  args.scores = slots.packed(place, scores, "scores", scores_dtype);
  Sorting out{args,
              place.empty_int32({experts + 1}),
              place.empty_int32({rows}),
              slots.lists() ? place.empty_int32({slots.count})
                            : place.empty_int32({slots.tokens, slots.top_k}),
              place.empty({rows}, scores_dtype),
              place.workspace(sort_workspace_bytes(slots.rows(), experts, 1))};
  out.args.offsets = static_cast<int32_t*>(out.offsets.data_ptr());
  out.args.row_token = static_cast<int32_t*>(out.row_token.data_ptr());
  out.args.slot_row = static_cast<int32_t*>(out.slot_row.data_ptr());
  out.args.row_score = out.row_score.data_ptr();
  out.args.workspace = out.workspace.data_ptr();
  return out;
}

namespace {

// logits (T, E), selection_bias (E), token_mask (T) bool -> scores (T, K), ids (T, K) int32, slopes
// (T, K), or (0, K) for softmax
Tensors3 route(Tensor const& logits, MaybeTensor const& selection_bias,
               MaybeTensor const& token_mask, int64_t top_k, int64_t score, bool renormalize,
               double scale, int64_t groups, int64_t top_groups, double sum_floor,
               int64_t group_score) {
  Place const place(logits, "logits");
  require_dims(logits, "logits", 2);
  int64_t const tokens = logits.size(0), experts = logits.size(1);
  DType const dtype = dtype_of(logits, "logits");
  Routed routed(place, {tokens, experts, top_k, dtype}, selection_bias, token_mask,
                {score, renormalize, scale, groups, top_groups, sum_floor, group_score});
  routed.args.logits = place.rows(logits, "logits", dtype, {tokens, experts});
  place.run(cpu::route, cuda::route, routed.args);
  return {routed.scores, routed.ids, routed.slopes};
}

// logits (T, E): only where needs_logits(router); the result has the dtype of `like`
Tensor route_backward(Tensor const& dscores, Tensor const& scores, Tensor const& ids,
                      MaybeTensor const& slopes, MaybeTensor const& logits, int64_t experts,
                      int64_t score, bool renormalize, double scale,
                      MaybeTensor const& token_offsets, MaybeTensor const& like, double sum_floor) {
  Place const place(dscores, "dscores");
  require(experts >= 0, "experts: expected 0 or more, got ", experts);
  Slots const slots = slots_of(place, ids, "ids", token_offsets);
  int64_t const tokens = slots.tokens;
  RouterGradient args;
  args.tokens = tokens;
  args.experts = experts;
  args.top_k = slots.top_k;
  args.slots = slots.count;
  args.token_offsets = slots.token_offsets;
  args.dtype = dtype_of(dscores, "dscores");
  args.router = router_of(score, renormalize, scale, sum_floor);
  if (logits.has_value()) {
    args.logits = place.rows(*logits, "logits", args.dtype, {tokens, experts});
  }
  if (slopes.has_value()) {
    args.slopes = slots.packed(place, *slopes, "slopes", args.dtype);
  }
  args.scores = slots.packed(place, scores, "scores", args.dtype);
  args.ids = slots.indices(place, ids, "ids");
  args.dscores = slots.packed(place, dscores, "dscores", args.dtype);
  DType const dtype = like.has_value() ? dtype_of(*like, "like") : args.dtype;
  if (dtype != args.dtype) {
    require(dtype == DType::bfloat16 || dtype == DType::float16,
            "like: expected the dtype of dscores, bfloat16 or float16");
    args.rounded_to = dtype;
  }
  Tensor dlogits = place.empty({tokens, experts}, dtype);
  args.dlogits = {dlogits.data_ptr(), 0};
  place.run(cpu::router_gradient, cuda::router_gradient, args);
  return dlogits;
}

// ids (T, K) of route, seed (1) int64 on the device -> for the slots of the tokens' lists: scores,
// ids, slopes (or an empty tensor); token_offsets (T + 1)
Tensors4 round_tokens(Tensor const& logits, Tensor const& ids, MaybeTensor const& seed,
                      int64_t score, bool renormalize, double scale, int64_t rounding, int64_t tile,
                      double sum_floor) {
  Place const place(logits, "logits");
  require_dims(logits, "logits", 2);
  require_dims(ids, "ids", 2);
  require(rounding >= 0 && rounding <= int64_t(Rounding::balanced),
          "rounding: expected 0 to 4, got ", rounding);
  require(tile >= 1 && tile <= 1 << 20, "tile: expected 1 to ", 1 << 20, ", got ", tile);
  int64_t const tokens = logits.size(0), experts = logits.size(1), top_k = ids.size(1);
  TokenRounding args;
  args.tokens = tokens;
  args.experts = experts;
  args.top_k = top_k;
  args.dtype = dtype_of(logits, "logits");
  args.router = router_of(score, renormalize, scale, sum_floor);
  args.rounding = Rounding(rounding);
  args.tile = tile;
  args.logits = place.rows(logits, "logits", args.dtype, {tokens, experts});
  args.ids = place.indices(ids, "ids", {tokens, top_k});
  if (seed.has_value()) args.seed = place.seed(*seed, "seed");
  int64_t const slots = rounded_slots(tokens, experts, top_k, args.rounding, tile);
  bool const sloped = has_slopes(args.router);
  Tensor scores = place.empty({slots}, args.dtype);
  Tensor slopes = place.empty({sloped ? slots : 0}, args.dtype);
  Tensor list_ids = place.empty_int32({slots}), token_offsets = place.empty_int32({tokens + 1});
  args.scores = scores.data_ptr();
  args.slopes = sloped ? slopes.data_ptr() : nullptr;
  args.list_ids = static_cast<int32_t*>(list_ids.data_ptr());
  args.token_offsets = static_cast<int32_t*>(token_offsets.data_ptr());
  Tensor const workspace = place.workspace(rounding_workspace_bytes(tokens, experts));
  args.workspace = workspace.data_ptr();
  place.run(cpu::round_tokens, cuda::round_tokens, args);
  return {scores, list_ids, slopes, token_offsets};
}

// -> offsets (E + 1), row_token (R), slot_row as ids, row_score (R)
Tensors4 sort_by_expert(Tensor const& ids, Tensor const& scores, int64_t experts,
                        MaybeTensor const& token_offsets) {
  Place const place(ids, "ids");
  Sorting out = sorting(place, ids, scores, experts, dtype_of(scores, "scores"), token_offsets);
  place.run(cpu::sort_by_expert, cuda::sort_by_expert, out.args);
  return {out.offsets, out.row_token, out.slot_row, out.row_score};
}

}  // namespace

void define_routing(Library& m) {
  m.def(
      "route(Tensor logits, Tensor? selection_bias, Tensor? token_mask, int top_k, int score, bool "
      "renormalize, float scale, int groups, int top_groups, float sum_floor, int "
      "group_score) -> (Tensor scores, Tensor ids, Tensor slopes)");
  m.def(
      "route_backward(Tensor dscores, Tensor scores, Tensor ids, Tensor? slopes, Tensor? logits, "
      "int experts, int score, bool renormalize, float scale, Tensor? token_offsets=None, Tensor? "
      "like=None, float sum_floor=0.0) -> Tensor");
  m.def(
      "round_tokens(Tensor logits, Tensor ids, Tensor? seed, int score, bool renormalize, float "
      "scale, int rounding, int tile, float sum_floor) -> (Tensor scores, Tensor ids, Tensor "
      "slopes, Tensor token_offsets)");
  m.def(
      "sort_by_expert(Tensor ids, Tensor scores, int experts, Tensor? token_offsets=None) -> "
      "(Tensor offsets, Tensor row_token, Tensor slot_row, Tensor row_score)");
}

void implement_routing(Library& m) {
  m.impl("route", TORCH_BOX(&route));
  m.impl("route_backward", TORCH_BOX(&route_backward));
  m.impl("round_tokens", TORCH_BOX(&round_tokens));
  m.impl("sort_by_expert", TORCH_BOX(&sort_by_expert));
}

}  // namespace guild::binding
