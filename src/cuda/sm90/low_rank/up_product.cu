// The up projection with a low-rank term: its choice of a kernel, and its launch.
#include "cuda/sm90/low_rank/launch.cuh"
#include "cuda/sm90/products.h"
#include "cuda/sm90/up_params.cuh"

namespace guild::cuda::sm90 {
namespace {

template <class T, Major major, bool gathered, StaticActivation known>
void launch_up(UpProduct const& x, Queue const& queue) {
  constexpr GemmConfig c = kLowRankConfig;
  using Loader = LowRankLoader<RowLoader<T, c, major, gathered>>;
  using Kernel = GroupedProduct<c, Loader, Activate<T, known>>;
  auto params = up_params<Kernel, T, c, major>(x);
  int64_t const columns = x.pairing == Pairing::alternate ? 2 * x.n : x.n;
  add_low_rank<T, major>(params, x.low_rank, x.rows, columns, x.pairing == Pairing::halves);
  launch<Kernel>(params, most_tiles<c>(x.rows, params.work), queue);
}

}  // namespace

void low_rank_up_product(UpProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  with_product(x.dtype, x.w[0].in_stride == 1, x.row_token != nullptr,
               [&]<class T, Major major, bool gathered> {
                 with_swiglu_or_any(static_activation_of(x.activation, x.pairing), [&](auto known) {
                   launch_up<T, major, gathered, known.value>(x, queue);
                 });
               });
}

}  // namespace guild::cuda::sm90
