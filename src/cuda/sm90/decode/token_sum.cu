#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/decode/launch.cuh"
#include "cuda/sm90/decode/token_sum.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, DecodeShape shape>
void launch_token_sum(TokenSum const& x, Queue const& queue) {
  using Kernel = TokenSumKernel<T, shape>;
  int64_t const slots = x.sort.top_k, terms = slots + x.shared;
  typename Kernel::Params p{};
  p.width = 64;
  while (p.width * terms > shape.rows) p.width /= 2;
  p.sort = x.sort;
  p.score = x.score;
  p.weight = block_map<T, Major::K>(x.w, x.sort.experts, x.n, x.k, p.width, "w_down");
  p.a_map = row_map<T>(x.a, terms, x.k, 1, 8, "a");
  p.across = int(ceil_div(x.n, p.width));
  p.columns = int(x.n);
  p.k = int(x.k);
  p.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, x.n)};
  p.residual = static_cast<T const*>(x.residual);
  p.o = static_cast<T*>(x.o);
  p.residual_scale = x.residual_scale;
  p.shared = x.shared;
  if (x.shared) {
    p.shared_weight = block_map<T, Major::K>(x.shared_w, 1, x.n, x.k, p.width, "shared.w_down");
  }
  launch_decode<Kernel>(p, p.across, queue);
}

// Calls f.template operator()<shape>() with one that holds eight rows of each weight or more. With
// long sums, 16 rows of two weights read faster than 32, of which there are too few; 8 do not.
template <class F>
void with_terms(int64_t terms, F&& f) {
  if (terms <= 2) {
    f.template operator()<DecodeShape{8, 32}>();
  } else if (terms <= 8) {
    f.template operator()<DecodeShape{8, 64}>();
  } else if (terms <= 10) {
    f.template operator()<DecodeShape{16, 80}>();
  } else {
    f.template operator()<DecodeShape{16, 128}>();
  }
}

}  // namespace

bool token_sum(TokenSum const& x, Queue const& queue) {
  bool const fits = x.sort.tokens == 1 && x.sort.top_k + x.shared <= 16;
  if (!fits || x.w.in_stride != 1 || x.w.expert_at != nullptr) return false;
  with_type(x.dtype, [&](auto element) {
    with_terms(x.sort.top_k + x.shared,
               [&]<DecodeShape shape> { launch_token_sum<decltype(element), shape>(x, queue); });
  });
  return true;
}

}  // namespace guild::cuda::sm90
