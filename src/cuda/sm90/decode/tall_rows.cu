// Products by row of tens to hundreds of rows per expert: the down projection, grouped_mm.
#include "cuda/sm90/decode/tall_launch.cuh"

namespace guild::cuda::sm90 {

void tall_row_product(RowProduct const& x, Queue const& queue) {
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    using Product = TallProduct<T, false, false, false>;
    typename Product::Params p{};
    p.groups = x.groups;
    p.columns = int(x.n);
    p.narrow_up_to = narrow_up_to(x.rows, x.groups.groups, x.n, 128);
    p.k = int(x.k);
    p.early = x.after_up;
    p.weight = tall_weights<T>(x.w[0], x.w[0], x.groups.groups, x.n, x.k, Pairing::none, "weight");
    p.expert_at = x.w[0].expert_at;
    p.x_map[0] = row_map<T>(x.a, x.rows, x.k, 1, 32, "a");
    p.x_map[1] = row_map<T>(x.a, x.rows, x.k, 1, 8, "a");
    p.claims = claims_of(x.d.data, queue);
    p.results.out = row_output<T>(x.d, x.rows, x.n, 1, "out");
    p.results.short_lived = x.short_lived;
    p.results.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, x.n)};
    p.results.pairing = {Pairing::none};
    launch_tall<Product>(p, x.rows, queue);
  });
}

}  // namespace guild::cuda::sm90
