// The down gradient with a low-rank term: its choice of a kernel, and its launch.
#include "cuda/sm90/down_gradient_params.cuh"
#include "cuda/sm90/low_rank/launch.cuh"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

template <class T, Major major, bool gathered, StaticActivation known>
void launch_down_gradient(DownGradientProduct const& x, Queue const& queue) {
  constexpr GemmConfig c = kLowRankConfig;
  using Loader = LowRankLoader<RowLoader<T, c, major, gathered>>;
  using Kernel = GroupedProduct<c, Loader, DownGradientEpilogue<T, known>>;
  auto params = down_gradient_params<Kernel, T, c, major>(x);
  add_low_rank<T, major>(params, x.low_rank, x.rows, x.n, false);
  launch<Kernel>(params, most_tiles<c>(x.rows, params.work), queue);
}

}  // namespace

void low_rank_down_gradient_product(DownGradientProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  bool const k_major = x.w.in_stride == 1 && x.w.out_stride != 1;
  with_product(x.dtype, k_major, x.row_token != nullptr, [&]<class T, Major major, bool gathered> {
    with_swiglu_or_any(static_activation_of(x.activation, x.pairing), [&](auto known) {
      launch_down_gradient<T, major, gathered, known.value>(x, queue);
    });
  });
}

}  // namespace guild::cuda::sm90
