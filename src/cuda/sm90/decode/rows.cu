// Products by row of few rows: the down projection, grouped_mm.
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/decode/launch.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, Major major, int tokens, PlanFrom from>
void launch_rows(RowProduct const& x, Queue const& queue) {
  constexpr DecodeShape shape{tokens, 64};
  using Product = DecodeProduct<T, shape, major, false, false, from, StaticActivation::any>;
  typename Product::Params p{};
  p.plan.groups = x.groups;
  if (x.sort != nullptr) p.plan.sort = *x.sort;
  p.weight = weight_source<Product, T, major>(x.w[0], x.w[0], x.groups.groups, x.n, x.k,
                                              /*halves=*/false, "weight");
  p.expert_at[0] = p.expert_at[1] = x.w[0].expert_at;
  p.halves = false;
  p.across = int(ceil_div(x.n, shape.rows));
  p.rows = int(x.rows);
  p.k = int(x.k);
  p.early = x.after_up;
  p.x_map = row_map<T>(x.a, x.rows, x.k, 1, 8, "a");
  auto& out = p.results.target[0];
  out.a = {static_cast<T*>(x.d.data), row_stride(x.d, x.n)};
  out.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, x.n)};
  out.columns = int(x.n);
  p.results.pairing = {Pairing::none};
  p.claims = claims_of(x.d.data, queue);
  if (x.shared.k > 0) {
    auto& shared = p.shared;
    shared.weight = weight_source<Product, T, major>(x.shared.w, x.shared.w, 1, x.n, x.shared.k,
                                                     /*halves=*/false, "shared.w_down");
    shared.x_map = row_map<T>(x.shared.a, x.tokens, x.shared.k, 1, 8, "shared a");
    shared.rows = int(x.tokens);
    shared.across = p.across;
    shared.k = int(x.shared.k);
    p.results.target[1].a = {static_cast<T*>(x.shared.d.data), row_stride(x.shared.d, x.n)};
    p.results.target[1].columns = int(x.n);
  }
  launch_decode<Product>(p, most_decode_tiles(p, x.groups.groups, tokens), kAtOnce, queue);
}

}  // namespace

void decode_row_product(RowProduct const& x, Queue const& queue) {
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    with_tokens(most_tokens(x), x.rows, x.groups.groups, [&]<int tokens> {
      if (x.w[0].in_stride != 1) {
        launch_rows<T, Major::MN, tokens, PlanFrom::any>(x, queue);
      } else if (x.sort == nullptr) {
        launch_rows<T, Major::K, tokens, PlanFrom::offsets>(x, queue);
      } else {
        launch_rows<T, Major::K, tokens, PlanFrom::slots>(x, queue);
      }
    });
  });
}

}  // namespace guild::cuda::sm90
