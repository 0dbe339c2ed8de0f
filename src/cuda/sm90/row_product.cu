// The down projection, the up gradient and grouped_gemm: which kernel serves them, and its launch.
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/products.h"
#include "cuda/sm90/row_params.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, GemmConfig c, Major major, class Epilogue>
void launch_row_product(RowProduct const& x, Epilogue const& epilogue, Queue const& queue) {
  using Kernel = GroupedProduct<c, TmaRows<T, c, major>, Epilogue>;
  auto const params = row_params<Kernel, T, c, major>(x, epilogue);
  launch<Kernel>(params, most_tiles<c>(x.rows, params.work), queue);
}

}  // namespace

void row_product(RowProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  if (serves_tall(x)) return tall_row_product(x, queue);
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
