#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/decode/launch.cuh"
#include "cuda/sm90/decode/token_sum.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, int most>
void launch_token_sum(TokenSum const& x, Queue const& queue) {
  using Kernel = TokenSumKernel<T, most>;
  int64_t const slots = x.sort.top_k;
  typename Kernel::Params p{};
  p.width = 64;
  while (p.width * slots > 64) p.width /= 2;
  p.sort = x.sort;
  p.score = x.score;
  p.weight = streamed_map(
      x.w.data, dtype_of<T>(),
      {x.k, x.n, x.sort.experts, x.w.out_stride, x.w.expert_stride, kBoxColumns, p.width, 1},
      "w_down");
  p.a_map = row_map<T>(x.a, slots, x.k, 1, 8, "a");
  p.across = int(ceil_div(x.n, p.width));
  p.columns = int(x.n);
  p.k = int(x.k);
  p.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, x.n)};
  p.residual = static_cast<T const*>(x.residual);
  p.o = static_cast<T*>(x.o);
  static AllowedOn allowed;
  launch_few(token_sum_kernel<T, most>, allowed, int(sizeof(typename Kernel::SharedStorage)), p,
             p.across, queue);
}

}  // namespace

bool token_sum(TokenSum const& x, Queue const& queue) {
  if (x.sort.tokens != 1 || x.sort.top_k > 8 || x.w.in_stride != 1 || x.w.expert_at != nullptr) {
    return false;
  }
  with_type(x.dtype, [&](auto element) { launch_token_sum<decltype(element), 8>(x, queue); });
  return true;
}

}  // namespace guild::cuda::sm90
