#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

template <class T, GemmConfig c, Major major, class Epilogue>
void launch_row_product(RowProduct const& x, Epilogue const& epilogue, Queue const& queue) {
  using Kernel = GroupedProduct<c, TmaRows<T, c, major>, Epilogue>;
  int const half_steps = int((x.k + c.tile_k - 1) / c.tile_k);
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(x.n, c.tile_n)),
                 .inner = x.halves * half_steps * c.tile_k};
  params.load.a = row_map<T>(x.a, x.rows, x.k, x.halves, c.tile_m, "a");
  auto const map = [&](ConstWeight const& w) {
    return weight_map<T, c, major>(w, x.groups.groups, x.n, x.k, "weight");
  };
  params.load.b = {{map(x.w[0]), map(x.w[x.halves - 1])}, false, half_steps};
  params.epilogue = epilogue;
  launch<Kernel>(params, most_tiles<c>(x.rows, x.groups.groups, x.n, c.tile_n), queue);
}

}  // namespace

void row_product(RowProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  if (serves_few_tokens(x)) return decode_row_product(x, queue);
  TileCount const count{.rows = x.rows,
                        .groups = x.groups.groups,
                        .columns = x.n,
                        .inner = x.halves * x.k,
                        .ragged = true};
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    Bias<T> const bias{static_cast<T const*>(x.bias.data), row_stride(x.bias, x.n)};
    auto const launch_with = [&]<GemmConfig c>(auto const& epilogue) {
      if (x.w[0].in_stride == 1) {
        launch_row_product<T, c, Major::K>(x, epilogue, queue);
      } else {
        launch_row_product<T, c, Major::MN>(x, epilogue, queue);
      }
    };
    if (x.direct.data != nullptr) {
      with_config<Product::direct>(count, [&]<GemmConfig c> {
        launch_with.template operator()<c>(StoreDirect<T>{x.direct, bias});
      });
    } else {
      StoreRows<T> const boxes{row_output<T>(x.d, x.rows, x.n, 1, "out"), bias};
      with_config<Product::rows>(count,
                                 [&]<GemmConfig c> { launch_with.template operator()<c>(boxes); });
    }
  });
}

}  // namespace guild::cuda::sm90
