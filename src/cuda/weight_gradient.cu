// dW1[e] = dH[rows of e]^T X[tokens of e] and dW2[e] = dO[tokens of e]^T A'[rows of e]
#include "checks/check.h"
#include "cuda/gate_up.h"
#include "cuda/require_runnable.h"

namespace guild::cuda {
namespace {

// D[e] = (rows of a)^T (rows of b), into experts' matrices of hidden rows; d is set by the caller.
template <class Step>
ExpertProduct product_of(Step const& x, ConstRows a, ConstRows b, int64_t columns) {
  Sizes const& s = x.sizes;
  return {.dtype = x.dtype,
          .m = s.hidden,
          .n = columns,
          .rows = s.rows(),
          .tokens = s.tokens,
          .groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
          .a = a,
          .row_token = x.routing.row_token,
          .b = b,
          .d_dtype = x.dw_dtype,
          .accumulate = x.accumulate,
          .schedule = x.schedule};
}

GateUpView<Weight> view_of(UpWeightGradient const& x) {
  return gate_up_view(x.dw, x.sizes, x.gated, x.order, element_bytes(x.dw_dtype), "dw_up");
}

// Of what is gathered: X or dO.
void require_summable(Sizes const& s, Routing const& routing, ConstRows const& rows,
                      char const* name) {
  require_at_most(s.rows(), kMostSummedRows, "rows");
  require_aligned(rows, name);
  if (routing.row_token != nullptr) require_addressable(rows, s.tokens, s.hidden, name);
}

}  // namespace

void require_runnable(UpWeightGradient const& x) {
  check(x);
  require_layer(x.sizes, x.dtype);
  require_summable(x.sizes, x.routing, x.x, "x");
  require_aligned(x.dh, "dh");
  view_of(x);
}

void require_runnable(DownWeightGradient const& x) {
  check(x);
  require_layer(x.sizes, x.dtype);
  require_summable(x.sizes, x.routing, x.dout, "dout");
  require_aligned(x.a, "a");
}

// Only the product's first operand can be gathered, so dW1 is computed as its transpose, X^T dH.
void up_weight_gradient(UpWeightGradient const& x, Queue queue) {
  require_runnable(x);
  int64_t const bytes = element_bytes(x.dw_dtype);
  auto const view = view_of(x);
  bool const packed = view.halves == 2 && are_one_matrix(x.dw, x.sizes.experts,
                                                         view.width * view.w[0].out_stride, bytes);
  int64_t const total = view.width * view.halves;
  ConstRows const dh{x.dh.data, row_stride(x.dh, total)};
  ExpertProduct product = product_of(x, x.x, dh, packed ? total : view.width);
  product.d = transposed(view.w[0]);
  int32_t*& taken = product.schedule.taken;
  if (taken != nullptr) ++taken;  // counters: dW2's, then those of dW1's gate and up
  expert_product(product, queue);
  if (view.halves == 1 || packed) return;
  product.b.data = static_cast<char const*>(x.dh.data) + element_bytes(x.dtype) * view.width;
  product.d = transposed(view.w[1]);
  if (taken != nullptr) ++taken;
  expert_product(product, queue);
}

void down_weight_gradient(DownWeightGradient const& x, Queue queue) {
  require_runnable(x);
  ExpertProduct product = product_of(x, x.dout, x.a, x.sizes.intermediate);
  product.d = x.dw;
  expert_product(product, queue);
}

}  // namespace guild::cuda
