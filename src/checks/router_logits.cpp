// Checks of the arguments of the router's product, and the size of its workspace.
#include "checks/router_logits.h"

#include "checks/conditions.h"
#include "shared/router_product.h"
#include "shared/workspace.h"

namespace guild {

namespace {

void check_bias(RouterLogits const& x) {
  if (x.bias == nullptr) return;
  DType const wide = score_dtype(x.dtype);
  check_dtype(x.bias_dtype, "bias_dtype");
  require(x.bias_dtype == x.dtype || x.bias_dtype == wide, "bias_dtype: expected ",
          name_of(x.dtype), " or ", name_of(wide), ", got ", name_of(x.bias_dtype));
  check_address(x.bias, uintptr_t(element_bytes(x.bias_dtype)), "bias");
}

}  // namespace

void check(RouterLogits const& x) {
  check_size(x.tokens, 0, kMostRows, "tokens");
  check_size(x.hidden, 1, kMostColumns, "hidden");
  check_size(x.experts, 1, kMostExperts, "experts");
  check_dtype(x.dtype, "dtype");
  check_rows(x.x, x.tokens, x.hidden, "x");
  check_rows(x.weight, x.experts, x.hidden, "weight");
  check_optional_rows(x.logits, x.tokens, x.experts, "logits");
  auto const bytes = [&](int64_t experts) {
    return router_logits_workspace_bytes(x.tokens, x.hidden, experts, x.dtype);
  };
  check_workspace(x.workspace, bytes(x.experts));
  check_bias(x);
  check_optional_rows(x.gate, 1, x.hidden, "gate");
  bool const gated = x.gate.data != nullptr;
  check_pointer(x.gate_score, gated && x.tokens > 0, "gate_score");
  check_workspace(x.gate_workspace, gated ? bytes(1) : 0, "gate_workspace");
}

RouterLogits gate_of(RouterLogits const& product) {
  RouterLogits gate = product;
  gate.experts = 1;
  gate.weight = product.gate;
  gate.gate = {};
  gate.bias = nullptr;
  gate.logits = {product.gate_score};
  gate.workspace = product.gate_workspace;
  gate.sigmoid = true;
  return gate;
}

void check_pair(RouterLogits const& product, Route const& route) {
  require(product.logits.data == nullptr,
          "product.logits: expected null because logits are not kept");
  require(!product.sigmoid, "product.sigmoid: expected false because the router takes logits");
  require(route.logits.data == nullptr, "logits: expected null because the product computes them");
  require(route.tokens == product.tokens, "tokens: expected ", product.tokens,
          " as in the product, got ", route.tokens);
  require(route.experts == product.experts, "experts: expected ", product.experts,
          " as in the product, got ", route.experts);
  DType const dtype = score_dtype(product.dtype);
  require(route.dtype == dtype, "dtype: expected ", name_of(dtype),
          " like the product's logits, got ", name_of(route.dtype));
}

int64_t router_logits_workspace_bytes(int64_t tokens, int64_t hidden, int64_t experts,
                                      DType dtype) {
  check_size(tokens, 0, kMostRows, "tokens");
  check_size(hidden, 0, kMostColumns, "hidden");
  check_size(experts, 0, kMostExperts, "experts");
  check_dtype(dtype, "dtype");
  bool const split = choose_router_tile(tokens, hidden, experts).split;
  Carver carver(nullptr);
  carver.take(tokens, experts, split ? router_chunks(hidden) : 1,
              dtype == DType::float64 ? sizeof(double) : sizeof(float));
  return carver.used();
}

}  // namespace guild
