// Shared by the routing ops: the arguments of route, of the sort and of the router's product,
// prepared but not yet run.
#pragma once
#include "guild/router_logits.h"
#include "torch/tensors.h"

namespace guild::binding {

// The score of an op's argument, checked.
Score score_of(int64_t score);

// A sort with new tensors for its outputs: running `args` fills them. `scores` and row_score share
// a type. room: of rows, as in Sizes.
struct Sorting {
  Sort args;
  Tensor offsets, row_token, slot_row, row_score, workspace;
};
Sorting sorting(Place const& place, Tensor const& ids, Tensor const& scores, int64_t experts,
                DType scores_dtype, MaybeTensor const& token_offsets, int64_t room = -1);

// A route not yet run, without its logits and outputs.
struct RouteSizes {
  int64_t tokens, experts, top_k;
  DType dtype;  // of the logits and scores
};
struct RouterScalars {
  int64_t score;
  bool renormalize;
  double scale;
  int64_t groups, top_groups;
  double sum_floor;
  int64_t group_score;
};
Route route_of(Place const& place, RouteSizes const& sizes, MaybeTensor const& selection_bias,
               MaybeTensor const& token_mask, RouterScalars const& router);

// The same with new tensors for its outputs.
struct Routed {
  Route args;
  Tensor scores, ids, slopes;

  Routed(Place const& place, RouteSizes const& sizes, MaybeTensor const& selection_bias,
         MaybeTensor const& token_mask, RouterScalars const& router);
};

// The router's product of x (T, H) and weight (E, H) plus a bias (E) in their dtype or the logits',
// not yet run; the tensors, which are copied if the product cannot read their layout, must outlive
// it. In logits.cpp.
class RouterProduct {
 public:
  RouterProduct(Place const& place, Tensor const& x, Tensor const& weight, MaybeTensor const& bias,
                char const* name = "router.weight");

  RouteSizes sizes(int64_t top_k) const;
  int64_t workspace_bytes() const;
  // logits in a new tensor, float32, or float64
  Tensor logits(Place const& place);
  // route() then also writes sigmoid(x gate^T), (T) in float32, to `score`; of 16-bit operands.
  void add_gate(RouterProduct const& gate, void* score, void* workspace);
  // Routes by the logits, which are not kept, into the outputs of `route`.
  void route(Place const& place, Route const& route, void* workspace);
  // The arguments, for GPU kernels that fuse the product; null if PyTorch computes it.
  RouterLogits const* args(Place const& place, void* workspace);

 private:
  Tensor x_, weight_;
  MaybeTensor bias_;
  RouterLogits args_;
  bool by_torch_;
};

}  // namespace guild::binding
