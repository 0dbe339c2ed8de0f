// The router's product on its way into a layer, by the products that training routes by.
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "torch/ops.h"

namespace guild::binding {

namespace {

using torch::headeronly::ScalarType;

// a b^T of 16-bit matrices on a GPU, summed and returned in float32.
Tensor product_in_float32(Tensor const& a, Tensor const& b) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a),
                                    torch::stable::detail::from(torch::stable::transpose(b, 0, 1)),
                                    torch::stable::detail::from(ScalarType::Float)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::mm", "dtype", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor product(Tensor const& a, Tensor const& b) {
  return torch::stable::matmul(a, torch::stable::transpose(b, 0, 1));
}

}  // namespace

// The same calls as router_logits_forward in python/guild/_torch/router_gradients.py makes, so that
// a token is routed by the same bits in training and inference.
Tensor router_logits(Place const& place, Tensor const& x, Tensor const& weight) {
  require_dims(x, "x", 2);
  require_dims(weight, "router.weight", 2);
  DType const dtype = dtype_of(x, "x");
  place.typed(weight, "router.weight", dtype, {weight.size(0), x.size(1)});
  if (dtype == DType::float32 || dtype == DType::float64) return product(x, weight);
  if (place.on_cuda()) return product_in_float32(x, weight);
  auto const as_float32 = [](Tensor const& tensor) {
    return torch::stable::to(tensor, ScalarType::Float);
  };
  return product(as_float32(x), as_float32(weight));
}

}  // namespace guild::binding
