// The up projection of tens to hundreds of rows per expert.
#include "cuda/sm90/decode/tall_launch.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, bool gathered, bool plain>
void launch_up(UpProduct const& x, Queue const& queue) {
  using Product = TallProduct<T, gathered, true, plain>;
  bool const paired = x.pairing != Pairing::none;
  typename Product::Params p{};
  p.groups = x.groups;
  p.columns = int(x.n);
  p.narrow_up_to = narrow_up_to(x.rows, x.groups.groups, x.n, paired ? 64 : 128);
  p.k = int(x.k);
  p.early = x.after_pull;
  p.weight = tall_weights<T>(x.w[0], x.w[1], x.groups.groups, x.n, x.k, x.pairing, "w_up");
  p.expert_at = x.w[0].expert_at;
  if constexpr (gathered) {
    p.x = static_cast<T const*>(x.a.data);
    p.stride = addressable_stride(x.tokens, row_stride(x.a, x.k), "x");
    p.row_token = x.row_token;
    p.tokens = int(x.tokens);
  } else {
    p.x_map[0] = row_map<T>(x.a, x.rows, x.k, 1, 32, "x");
    p.x_map[1] = row_map<T>(x.a, x.rows, x.k, 1, 8, "x");
  }
  p.claims = claims_of(x.activated.data, queue);
  p.results.out = row_output<T>(x.activated, x.rows, x.n, 1, "a");
  p.results.short_lived = x.short_lived;
  p.results.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, paired ? 2 * x.n : x.n)};
  p.results.pairing = {x.pairing};
  p.results.activation = activation_in<float>(x.activation);
  launch_tall<Product>(p, x.rows, queue);
}

}  // namespace

void tall_up_product(UpProduct const& x, Queue const& queue) {
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    bool const plain = is_swiglu(x) && x.bias.data == nullptr;
    if (x.row_token == nullptr) return launch_up<T, false, false>(x, queue);
    if (plain) return launch_up<T, true, true>(x, queue);
    launch_up<T, true, false>(x, queue);
  });
}

}  // namespace guild::cuda::sm90
