// The up projection: which kernel serves it, and its launch.
#include "cuda/sm90/activate.cuh"
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/products.h"
#include "cuda/sm90/up_params.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, GemmConfig c, Major major, bool gathered, StaticActivation known>
void launch_up(UpProduct const& x, Queue const& queue) {
  using Loader = RowLoader<T, c, major, gathered>;
  using Kernel = GroupedProduct<c, Loader, Activate<T, known>>;
  auto const params = up_params<Kernel, T, c, major>(x);
  launch<Kernel>(params, most_tiles<c>(x.rows, params.work), queue);
}

}  // namespace

void up_product(UpProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  if (serves_tall(x)) return tall_up_product(x, queue);
  if (serves_few_tokens(x)) return decode_up_product(x, queue);
  TileCount const count{.rows = x.rows,
                        .groups = x.groups.groups,
                        .columns = x.pairing == Pairing::none ? x.n : 2 * x.n,
                        .inner = x.k,
                        .ragged = true};
  with_product(x.dtype, x.w[0].in_stride == 1, x.row_token != nullptr,
               [&]<class T, Major major, bool gathered> {
                 with_config<Product::up>(count, [&]<GemmConfig c> {
                   with_static_activation(static_activation_of(x.activation, x.pairing),
                                          [&](auto known) {
                                            launch_up<T, c, major, gathered, known.value>(x, queue);
                                          });
                 });
               });
}

}  // namespace guild::cuda::sm90
