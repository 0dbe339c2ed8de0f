// The router's product: by Guild's kernels, whose bits do not depend on the number of tokens, or by
// PyTorch's where Guild's do not apply.
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "cuda/alignment.h"
#include "torch/ops.h"
#include "torch/routing.h"

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

// Whether to use PyTorch's product: for float32 and float64, whose gradients are PyTorch's too, for
// empty operands, and on a GPU if H is not a multiple of 8 or there are more experts than routing
// supports.
bool needs_torch(Place const& place, RouterLogits const& x) {
  bool const narrow = x.dtype == DType::bfloat16 || x.dtype == DType::float16;
  return !narrow || x.hidden == 0 || x.experts == 0 ||
         (place.on_cuda() &&
          (x.hidden % kElementsPer16Bytes != 0 || x.experts > cuda::kMostRouted));
}

Tensor product_of_torch(Place const& place, DType dtype, Tensor const& x, Tensor const& weight) {
  bool const narrow = dtype == DType::bfloat16 || dtype == DType::float16;
  if (narrow && place.on_cuda()) return product_in_float32(x, weight);
  auto const as_float32 = [&](Tensor const& tensor) {
    return narrow ? torch::stable::to(tensor, ScalarType::Float) : tensor;
  };
  return torch::stable::matmul(as_float32(x), torch::stable::transpose(as_float32(weight), 0, 1));
}

// The matrix itself if the products can read its layout, otherwise a copy.
Tensor with_plain_rows(Place const& place, Tensor const& matrix) {
  bool const rows = matrix.size(1) <= 1 || matrix.stride(1) == 1;
  bool const apart = matrix.size(0) <= 1 || matrix.stride(0) >= matrix.size(1);
  if (rows && apart) return place.aligned(matrix);
  Tensor copy = torch::stable::new_empty(matrix, {matrix.size(0), matrix.size(1)});
  torch::stable::copy_(copy, matrix);
  return copy;
}

// Arguments of both steps at once.
struct RoutedProduct {
  RouterLogits const& product;
  Route const& route;
};

}  // namespace

RouterProduct::RouterProduct(Place const& place, Tensor const& x, Tensor const& weight,
                             MaybeTensor const& bias, char const* name)
    : x_(x), weight_(weight), bias_(bias) {
  require_dims(x, "x", 2);
  require_dims(weight, name, 2);
  args_.tokens = x.size(0);
  args_.hidden = x.size(1);
  args_.experts = weight.size(0);
  args_.dtype = dtype_of(x, "x");
  place.typed(weight, name, args_.dtype, {args_.experts, args_.hidden});
  if (bias.has_value()) {
    args_.bias_dtype = dtype_of(*bias, "router.bias");
    if (args_.bias_dtype != score_dtype(args_.dtype)) args_.bias_dtype = args_.dtype;
    args_.bias = place.packed(*bias, "router.bias", args_.bias_dtype, {args_.experts});
  }
  by_torch_ = needs_torch(place, args_);
  if (by_torch_) return;
  x_ = with_plain_rows(place, x);
  weight_ = with_plain_rows(place, weight);
  args_.x = place.rows(x_, "x", args_.dtype, {args_.tokens, args_.hidden});
  args_.weight = place.rows(weight_, name, args_.dtype, {args_.experts, args_.hidden});
}

RouteSizes RouterProduct::sizes(int64_t top_k) const {
  return {args_.tokens, args_.experts, top_k, score_dtype(args_.dtype)};
}

int64_t RouterProduct::workspace_bytes() const {
  if (by_torch_) return 0;
  return router_logits_workspace_bytes(args_.tokens, args_.hidden, args_.experts, args_.dtype);
}

Tensor RouterProduct::logits(Place const& place) {
  if (by_torch_) {
    Tensor const product = product_of_torch(place, args_.dtype, x_, weight_);
    return bias_ ? torch::stable::subtract(product, *bias_, -1.0) : product;
  }
  Tensor found = place.empty({args_.tokens, args_.experts}, DType::float32);
  args_.logits = {found.data_ptr(), 0};
  Tensor const workspace = place.workspace(workspace_bytes());
  args_.workspace = workspace.data_ptr();
  place.run(cpu::router_logits, cuda::router_logits, args_);
  return found;
}

void RouterProduct::add_gate(RouterProduct const& gate, void* score, void* workspace) {
  require(gate.args_.experts == 1, "shared_gate: expected one row, got ", gate.args_.experts);
  require(!by_torch_ && !gate.by_torch_,
          "shared_gate: expected bfloat16 or float16, on CUDA rows of a multiple of 16 bytes "
          "and at most 1,024 experts");
  args_.gate = gate.args_.weight;
  args_.gate_score = score;
  args_.gate_workspace = workspace;
}

void RouterProduct::route(Place const& place, Route const& given, void* workspace) {
  if (by_torch_) {
    Tensor const found = logits(place);
    Route args = given;
    args.logits = place.rows(found, "logits", args.dtype, {args.tokens, args.experts});
    place.run(cpu::route, cuda::route, args);
    return;
  }
  args_.workspace = workspace;
  place.run<RoutedProduct>([](RoutedProduct const& a) { cpu::route_tokens(a.product, a.route); },
                           [](RoutedProduct const& a, cuda::Queue queue) {
                             cuda::route_tokens(a.product, a.route, queue);
                           },
                           {args_, given});
}

RouterLogits const* RouterProduct::args(Place const& place, void* workspace) {
  if (by_torch_ || !place.on_cuda()) return nullptr;
  args_.workspace = workspace;
  return &args_;
}

namespace {

// x (T, H), weight (E, H), bias (E) -> (T, E) in float32, or float64
Tensor router_logits(Tensor const& x, Tensor const& weight, MaybeTensor const& bias) {
  Place const place(x, "x");
  return RouterProduct(place, x, weight, bias).logits(place);
}

// The same and route, of logits that are not kept
Tensors3 route_tokens(Tensor const& x, Tensor const& weight, MaybeTensor const& bias,
                      MaybeTensor const& selection_bias, MaybeTensor const& token_mask,
                      int64_t top_k, int64_t score, bool renormalize, double scale, int64_t groups,
                      int64_t top_groups, double sum_floor, int64_t group_score) {
  Place const place(x, "x");
  RouterProduct product(place, x, weight, bias);
  Routed routed(place, product.sizes(top_k), selection_bias, token_mask,
                {score, renormalize, scale, groups, top_groups, sum_floor, group_score});
  Tensor const workspace = place.workspace(product.workspace_bytes());
  product.route(place, routed.args, workspace.data_ptr());
  return {routed.scores, routed.ids, routed.slopes};
}

}  // namespace

void define_logits(Library& m) {
  m.def("router_logits(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "route_tokens(Tensor x, Tensor weight, Tensor? bias, Tensor? selection_bias, Tensor? "
      "token_mask, int top_k, int score, bool renormalize, float scale, int groups, int "
      "top_groups, float "
      "sum_floor, int group_score) -> (Tensor scores, Tensor ids, Tensor slopes)");
}

void implement_logits(Library& m) {
  m.impl("router_logits", TORCH_BOX(&router_logits));
  m.impl("route_tokens", TORCH_BOX(&route_tokens));
}

}  // namespace guild::binding
