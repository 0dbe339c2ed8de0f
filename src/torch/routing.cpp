// route, its gradient and the sort by expert.
#include "torch/ops.h"

namespace guild::binding {

namespace {

Router router_of(int64_t score, bool renormalize, double scale) {
  require(score == 0 || score == 1, "score: expected 0 (softmax) or 1 (sigmoid), got ", score);
  Router router;
  router.score = Score(score);
  router.renormalize = renormalize;
  router.scale = float(scale);
  return router;
}

}  // namespace

Tensors3 route(Tensor const& logits, MaybeTensor const& selection_bias,
               MaybeTensor const& token_mask, int64_t top_k, int64_t score, bool renormalize,
               double scale, int64_t groups, int64_t top_groups) {
  Place const place(logits, "logits");
  require_dims(logits, "logits", 2);
  int64_t const tokens = logits.size(0), experts = logits.size(1);
  require(top_k >= 1 && top_k <= experts, "top_k: expected 1 to ", experts, " (experts), got ",
          top_k);
  Route args;
  args.tokens = tokens;
  args.experts = experts;
  args.top_k = top_k;
  args.dtype = dtype_of(logits, "logits");
  args.router = router_of(score, renormalize, scale);
  require(groups >= 1 && groups <= experts, "groups: expected 1 to ", experts, " (experts), got ",
          groups);
  require(top_groups >= 1 && top_groups <= groups, "top_groups: expected 1 to ", groups,
          " (groups), got ", top_groups);
  args.router.groups = int(groups);
  args.router.top_groups = int(top_groups);
  args.logits = place.rows(logits, "logits", args.dtype, {tokens, experts});
  if (selection_bias.has_value()) {
    args.selection_bias = place.packed(*selection_bias, "selection_bias", args.dtype, {experts});
  }
  if (token_mask.has_value()) {
    args.token_mask = place.flags(*token_mask, "token_mask", {tokens});
  }
  Tensor ids = place.empty_int32({tokens, top_k});
  Tensor scores = place.empty({tokens, top_k}, args.dtype);
  args.ids = static_cast<int32_t*>(ids.data_ptr());
  args.scores = scores.data_ptr();
  bool const sloped = args.router.score == Score::sigmoid;
  Tensor slopes = place.empty({sloped ? tokens : 0, top_k}, args.dtype);
  args.slopes = sloped ? slopes.data_ptr() : nullptr;
  place.run(cpu::route, cuda::route, args);
  return {scores, ids, slopes};
}

Tensor route_backward(Tensor const& dscores, Tensor const& scores, Tensor const& ids,
                      MaybeTensor const& slopes, MaybeTensor const& logits, int64_t experts,
                      int64_t score, bool renormalize, double scale) {
  Place const place(dscores, "dscores");
  require_dims(ids, "ids", 2);
  int64_t const tokens = ids.size(0), top_k = ids.size(1);
  RouterGradient args;
  args.tokens = tokens;
  args.experts = experts;
  args.top_k = top_k;
  args.dtype = dtype_of(dscores, "dscores");
  args.router = router_of(score, renormalize, scale);
  if (logits.has_value()) {
    args.logits = place.rows(*logits, "logits", args.dtype, {tokens, experts});
  }
  if (slopes.has_value()) {
    args.slopes = place.packed(*slopes, "slopes", args.dtype, {tokens, top_k});
  }
  args.scores = place.packed(scores, "scores", args.dtype, {tokens, top_k});
  args.ids = place.indices(ids, "ids", {tokens, top_k});
  args.dscores = place.packed(dscores, "dscores", args.dtype, {tokens, top_k});
  Tensor dlogits = place.empty({tokens, experts}, args.dtype);
  args.dlogits = {dlogits.data_ptr(), 0};
  place.run(cpu::router_gradient, cuda::router_gradient, args);
  return dlogits;
}

Sorted sorted(Place const& place, Tensor const& ids, Tensor const& scores, int64_t experts,
              DType scores_dtype) {
  require_dims(ids, "ids", 2);
  int64_t const tokens = ids.size(0), top_k = ids.size(1), rows = tokens * top_k;
  Sort args{.tokens = tokens, .experts = experts, .top_k = top_k, .score_dtype = scores_dtype};
  args.ids = place.data(ids, "ids", {tokens, top_k});
  require(ids.is_contiguous(), "ids: expected a contiguous tensor");
  size_t const id_bytes = ids.element_size();
  require(id_bytes == 4 || id_bytes == 8, "ids: expected dtype int32 or int64, got elements of ",
          id_bytes, " bytes");
  args.ids_are_int64 = id_bytes == 8;
  args.scores = place.packed(scores, "scores", scores_dtype, {tokens, top_k});
  Sorted out{place.empty_int32({experts + 1}), place.empty_int32({rows}),
             place.empty_int32({tokens, top_k}), place.empty({rows}, scores_dtype)};
  args.offsets = static_cast<int32_t*>(out.offsets.data_ptr());
  args.row_token = static_cast<int32_t*>(out.row_token.data_ptr());
  args.slot_row = static_cast<int32_t*>(out.slot_row.data_ptr());
  args.row_score = out.row_score.data_ptr();
  Tensor const workspace = place.workspace(sort_workspace_bytes(tokens, experts, top_k));
  args.workspace = workspace.data_ptr();
  place.run(cpu::sort_by_expert, cuda::sort_by_expert, args);
  return out;
}

Tensors4 sort_by_expert(Tensor const& ids, Tensor const& scores, int64_t experts) {
  Place const place(ids, "ids");
  Sorted out = sorted(place, ids, scores, experts, dtype_of(scores, "scores"));
  return {out.offsets, out.row_token, out.slot_row, out.row_score};
}

}  // namespace guild::binding
