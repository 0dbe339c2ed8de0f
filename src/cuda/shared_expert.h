// Shared experts within the launches of a layer of few tokens, for inference.
#pragma once
#include "guild/cuda.h"
#include "guild/router_logits.h"

namespace guild::cuda {

// What moe_forward() adds for a layer's shared experts, one MLP that every token goes through. Its
// results, rounded like those of a separate forward, are the layer's residual. Weights are
// contiguous along their last dimension; activation and order are the layer's.
struct SharedExpert {
  int64_t intermediate = 0;  // W
  ConstUpWeight w_up;        // (1, W, H) twice
  ConstWeight w_down;        // (1, H, W)
  void* o = nullptr;         // (T, H), a work buffer
};

// Whether shared experts of any width can be computed in the launches of a layer of these sizes
// whose weights are contiguous along their last dimension.
bool fuses_shared_experts(Sizes const& sizes);

int64_t moe_forward_workspace_bytes(Sizes const& sizes, DType dtype, int64_t shared);

// Only where fuses_shared_experts(), for inference of tokens with top_k slots each. The layer's
// residual is null, its workspace of the size above.
void moe_forward(MoeForward const& layer, SharedExpert const& shared, Queue queue);

// A layer whose tokens' experts are chosen first: the route's ids and scores are the layer's.
struct LayerRouter {
  RouterLogits product;
  Route route;
};
// The router, then the layer, with shared experts unless null. A single token's experts are chosen
// in the layer's own launches where possible.
void moe_forward(MoeForward const& layer, LayerRouter const& router, SharedExpert const* shared,
                 Queue queue);

}  // namespace guild::cuda
