#include "cuda/sm90/down_gradient.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

template <class T, GemmConfig c, Major major, bool gathered, Known known>
void launch_down_gradient(DownGradientProduct const& x, Queue const& queue) {
  using Loader = RowLoader<T, c, major, gathered>;
  using Kernel = GroupedProduct<c, Loader, DownGradientEpilogue<T, known>>;
  int const halves = x.pairing == Pairing::halves ? 2 : 1;
  int64_t const width = x.n * (x.pairing == Pairing::alternate ? 2 : 1);
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(x.n, c.tile_n)),
                 .inner = int(x.k)};
  fill_rows<T, c, major>(params.load, x, "dout");
  CUtensorMap const map = weight_map<T, c, major>(x.w, x.groups.groups, x.n, x.k, "w_down");
  params.load.b = {{map, map}, false, INT32_MAX};
  auto& out = params.epilogue;
  out.h = row_map<T>(x.h, x.rows, width, halves, c.tile_m, "h");
  out.dh = row_output<T>(x.dh, x.rows, width, halves, "dh");
  out.a = row_output<T>(x.scaled, x.rows, x.n, 1, "a_scaled");
  out.score = x.score;
  out.parts = x.score_parts;
  out.part_count = int(ceil_div(x.n, kScoreColumns));
  out.dh_sums = x.dh_sums;
  out.dout_sums = x.a_sums;
  out.hidden = int(x.k);
  out.activation = activation_in<float>(x.activation);
  out.pairing = {x.pairing};
  launch<Kernel>(params, most_tiles<c>(x.rows, x.groups.groups, x.n, c.tile_n), queue);
}

}  // namespace

void down_gradient_product(DownGradientProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  TileCount const count{
      .rows = x.rows, .groups = x.groups.groups, .columns = x.n, .inner = x.k, .ragged = true};
  bool const k_major = x.w.in_stride == 1 && x.w.out_stride != 1;
  with_product(x.dtype, k_major, x.row_token != nullptr, [&]<class T, Major major, bool gathered> {
    with_config<Product::down_gradient>(count, [&]<GemmConfig c> {
      with_known(known_of(x.activation, x.pairing), [&](auto known) {
        launch_down_gradient<T, c, major, gathered, known.value>(x, queue);
      });
    });
  });
}

}  // namespace guild::cuda::sm90
