// The router's product: by Guild's own kernels, whose bits do not depend on the number of tokens,
// and where these do not serve, by PyTorch's.
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "guild/router_logits.h"
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

// PyTorch's products: of float32 and float64, whose gradients PyTorch makes from the same, and on a
// GPU of sizes that have no rows on 16-byte boundaries or more experts than a router there.
bool needs_torch(Place const& place, RouterLogits const& x) {
  bool const narrow = x.dtype == DType::bfloat16 || x.dtype == DType::float16;
  return !narrow || x.hidden == 0 || x.experts == 0 ||
         (place.on_cuda() && (x.hidden % 8 != 0 || x.experts > 1024));
}

Tensor product_of_torch(Place const& place, DType dtype, Tensor const& x, Tensor const& weight) {
  bool const narrow = dtype == DType::bfloat16 || dtype == DType::float16;
  if (narrow && place.on_cuda()) return product_in_float32(x, weight);
  auto const as_float32 = [&](Tensor const& tensor) {
    return narrow ? torch::stable::to(tensor, ScalarType::Float) : tensor;
  };
  return torch::stable::matmul(as_float32(x), torch::stable::transpose(as_float32(weight), 0, 1));
}

// The matrix where it lies if the products read it there, otherwise copied.
Tensor with_plain_rows(Place const& place, Tensor const& matrix) {
  bool const rows = matrix.size(1) <= 1 || matrix.stride(1) == 1;
  bool const apart = matrix.size(0) <= 1 || matrix.stride(0) >= matrix.size(1);
  auto const address = reinterpret_cast<uintptr_t>(matrix.data_ptr());
  bool const aligned =
      !place.on_cuda() || (address % 16 == 0 && (matrix.size(0) <= 1 || matrix.stride(0) % 8 == 0));
  if (rows && apart && aligned) return matrix;
  Tensor copy = torch::stable::new_empty(matrix, {matrix.size(0), matrix.size(1)});
  torch::stable::copy_(copy, matrix);
  return copy;
}

// A product's operands, kept, and its arguments without logits and workspace.
struct Operands {
  Tensor x, weight;
  RouterLogits args;

  Operands(Place const& place, Tensor const& given_x, Tensor const& given_weight)
      : x(given_x), weight(given_weight) {
    require_dims(x, "x", 2);
    require_dims(weight, "router.weight", 2);
    args.tokens = x.size(0);
    args.hidden = x.size(1);
    args.experts = weight.size(0);
    args.dtype = dtype_of(x, "x");
    place.typed(weight, "router.weight", args.dtype, {args.experts, args.hidden});
  }
  void settle(Place const& place) {
    x = with_plain_rows(place, x);
    weight = with_plain_rows(place, weight);
    args.x = place.rows(x, "x", args.dtype, {args.tokens, args.hidden});
    args.weight = place.rows(weight, "router.weight", args.dtype, {args.experts, args.hidden});
  }
  Tensor workspace(Place const& place) {
    Tensor memory = place.workspace(
        router_logits_workspace_bytes(args.tokens, args.hidden, args.experts, args.dtype));
    args.workspace = memory.data_ptr();
    return memory;
  }
};

}  // namespace

Tensor router_logits(Tensor const& x, Tensor const& weight) {
  Place const place(x, "x");
  Operands operands(place, x, weight);
  RouterLogits& args = operands.args;
  if (needs_torch(place, args)) return product_of_torch(place, args.dtype, x, weight);
  operands.settle(place);
  Tensor logits = place.empty({args.tokens, args.experts}, DType::float32);
  args.logits = {logits.data_ptr(), 0};
  Tensor const workspace = operands.workspace(place);
  place.run(cpu::router_logits, cuda::router_logits, args);
  return logits;
}

namespace {

// Arguments of both steps at once.
struct RoutedProduct {
  RouterLogits const& product;
  Route const& route;
};

}  // namespace

Tensors3 route_tokens(Tensor const& x, Tensor const& weight, MaybeTensor const& selection_bias,
                      MaybeTensor const& token_mask, int64_t top_k, int64_t score, bool renormalize,
                      double scale, int64_t groups, int64_t top_groups, double sum_floor,
                      int64_t group_score) {
  Place const place(x, "x");
  Operands operands(place, x, weight);
  RouterLogits& args = operands.args;
  if (needs_torch(place, args)) {
    return route(product_of_torch(place, args.dtype, x, weight), selection_bias, token_mask, top_k,
                 score, renormalize, scale, groups, top_groups, sum_floor, group_score);
  }
  operands.settle(place);
  Tensor const workspace = operands.workspace(place);
  Routed routed(place, {args.tokens, args.experts, top_k, DType::float32}, selection_bias,
                token_mask,
                {score, renormalize, scale, groups, top_groups, sum_floor, group_score});
  place.run<RoutedProduct>([](RoutedProduct const& a) { cpu::route_tokens(a.product, a.route); },
                           [](RoutedProduct const& a, cuda::Queue queue) {
                             cuda::route_tokens(a.product, a.route, queue);
                           },
                           {args, routed.args});
  return {routed.scores, routed.ids, routed.slopes};
}

}  // namespace guild::binding
