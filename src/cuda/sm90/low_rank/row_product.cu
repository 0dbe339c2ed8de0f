// The down projection and the up gradient with a low-rank term: their launch.
#include "cuda/sm90/low_rank/launch.cuh"
#include "cuda/sm90/products.h"
#include "cuda/sm90/row_params.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, Major major>
void launch_row_product(RowProduct const& x, Queue const& queue) {
  constexpr GemmConfig c = kLowRankConfig;
  using Kernel = GroupedProduct<c, LowRankLoader<TmaRows<T, c, major>>, StoreRows<T>>;
  Bias<T> const bias{static_cast<T const*>(x.bias.data), row_stride(x.bias, x.n)};
  StoreRows<T> const rows{row_output<T>(x.d, x.rows, x.n, 1, "out"), bias};
  auto params = row_params<Kernel, T, c, major>(x, rows);
  add_low_rank<T, major>(params, x.low_rank, x.rows, x.n, false);
  launch<Kernel>(params, most_tiles<c>(x.rows, params.work), queue);
}

}  // namespace

void low_rank_row_product(RowProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    if (x.w[0].in_stride == 1) {
      launch_row_product<T, Major::K>(x, queue);
    } else {
      launch_row_product<T, Major::MN>(x, queue);
    }
  });
}

}  // namespace guild::cuda::sm90
