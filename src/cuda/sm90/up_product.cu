#include "cuda/sm90/activate.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

template <class T, GemmConfig c, Major major, bool gathered, Known known>
void launch_up(UpProduct const& x, Queue const& queue) {
  using Loader = RowLoader<T, c, major, gathered>;
  using Kernel = GroupedProduct<c, Loader, Activate<T, known>>;
  bool const halves = x.pairing == Pairing::halves;
  int64_t const columns = x.pairing == Pairing::alternate ? 2 * x.n : x.n;  // of a half, or of all
  int64_t const tile_n = halves ? c.tile_n / 2 : c.tile_n;
  int const count = halves ? 2 : 1;
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = int(tile_n),
                 .across = int(ceil_div(columns, tile_n)),
                 .inner = int(x.k)};
  fill_rows<T, c, major>(params.load, x, "x");
  auto const map = [&](ConstWeight const& w) {
    return weight_map<T, c, major>(w, x.groups.groups, columns, x.k, "w_up");
  };
  params.load.b = {{map(x.w[0]), map(x.w[1])}, halves, INT32_MAX};
  auto& out = params.epilogue;
  out.h = row_output<T>(x.h, x.rows, columns, count, "h");
  out.a = row_output<T>(x.activated, x.rows, x.n, 1, "a");
  out.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, columns * count)};
  out.activation = activation_in<float>(x.activation);
  out.pairing = {x.pairing};
  launch<Kernel>(params, most_tiles<c>(x.rows, x.groups.groups, columns, tile_n), queue);
}

}  // namespace

void up_product(UpProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  TileCount const count{.rows = x.rows,
                        .groups = x.groups.groups,
                        .columns = x.pairing == Pairing::none ? x.n : 2 * x.n,
                        .inner = x.k,
                        .ragged = true};
  with_product(x.dtype, x.w[0].in_stride == 1, x.row_token != nullptr,
               [&]<class T, Major major, bool gathered> {
                 with_config<Product::up>(count, [&]<GemmConfig c> {
                   with_known(known_of(x.activation, x.pairing), [&](auto known) {
                     launch_up<T, c, major, gathered, known.value>(x, queue);
                   });
                 });
               });
}

}  // namespace guild::cuda::sm90
