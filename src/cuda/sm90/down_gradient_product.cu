// The down gradient: its choice of a kernel, and its launch.
#include "cuda/sm90/down_gradient_params.cuh"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

template <class T, GemmConfig c, Major major, bool gathered, StaticActivation known>
void launch_down_gradient(DownGradientProduct const& x, Queue const& queue) {
  using Loader = RowLoader<T, c, major, gathered>;
  using Kernel = GroupedProduct<c, Loader, DownGradientEpilogue<T, known>>;
  auto const params = down_gradient_params<Kernel, T, c, major>(x);
  launch<Kernel>(params, most_tiles<c>(x.rows, params.work), queue);
}

}  // namespace

void down_gradient_product(DownGradientProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  TileCount const count{
      .rows = x.rows, .groups = x.groups.groups, .columns = x.n, .inner = x.k, .ragged = true};
  bool const k_major = x.w.in_stride == 1 && x.w.out_stride != 1;
  with_product(x.dtype, k_major, x.row_token != nullptr, [&]<class T, Major major, bool gathered> {
    with_config<Product::down_gradient>(count, [&]<GemmConfig c> {
      with_swiglu_or_any(static_activation_of(x.activation, x.pairing), [&](auto known) {
        launch_down_gradient<T, c, major, gathered, known.value>(x, queue);
      });
    });
  });
}

}  // namespace guild::cuda::sm90
