// The up projection of few tokens.
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/decode/launch.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, Major major, bool gathered, int tokens>
void launch_up(UpProduct const& x, Queue const& queue) {
  // Small tiles where there are few of them.
  constexpr DecodeShape shape{tokens, tokens == 8 && major == Major::K ? 1 : 2};
  using Product = DecodeProduct<T, shape, major, gathered, true>;
  bool const halves = x.pairing == Pairing::halves;
  int64_t const columns = x.pairing == Pairing::alternate ? 2 * x.n : x.n;
  typename Product::Params p{};
  p.plan.groups = x.groups;
  if (x.sort != nullptr) p.plan.sort = *x.sort, p.plan.writes = true;
  for (int i = 0; i < 2; ++i) {
    p.weight[i] = block_map<T, major>(x.w[i], x.groups.groups, columns, x.k,
                                      Product::kHalfBoxes ? 32 : 64, "w_up");
    p.expert_at[i] = x.w[i].expert_at;
  }
  p.halves = halves;
  p.across = int(ceil_div(columns, 64 * shape.parts / (halves ? 2 : 1)));
  p.rows = int(x.rows);
  p.k = int(x.k);
  if constexpr (gathered) {
    p.x = static_cast<T const*>(x.a.data);
    p.stride = addressable_stride(x.tokens, row_stride(x.a, x.k), "x");
    p.row_token = x.row_token;
    p.tokens = int(x.tokens);
  } else {
    p.x_map = row_map<T>(x.a, x.rows, x.k, 1, 8, "x");
  }
  auto& out = p.results;
  out.h = {static_cast<T*>(x.h.data), row_stride(x.h, columns * (halves ? 2 : 1))};
  out.a = {static_cast<T*>(x.activated.data), row_stride(x.activated, x.n)};
  out.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, columns * (halves ? 2 : 1))};
  out.columns = int(columns);
  out.pairing = x.pairing;
  out.activation = activation_in<float>(x.activation);
  if (known_of(x.activation, x.pairing) == Known::swiglu) out.activation.up_offset = -0.f;
  launch_decode<Product>(p, most_decode_tiles(x.rows, x.groups.groups, p.across, tokens), queue);
}

}  // namespace

void decode_up_product(UpProduct const& x, Queue const& queue) {
  with_product(x.dtype, x.w[0].in_stride == 1, x.row_token != nullptr,
               [&]<class T, Major major, bool gathered> {
                 with_tokens(x.tokens,
                             [&]<int tokens> { launch_up<T, major, gathered, tokens>(x, queue); });
               });
}

}  // namespace guild::cuda::sm90
