// H = X[row_token] W1^T + b1;  A = activation(H)
#include "check.h"
#include "cuda/gate_up.h"
#include "cuda/sm90/activate.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {
namespace {

template <class T, GemmConfig c, Major major, bool gathered, Known known>
void launch_known(UpProjection const& x, GateUpView<ConstWeight> const& view, Pairing pairing,
                  Queue const& queue) {
  using Loader = RowLoader<T, c, major, gathered>;
  using Kernel = GroupedProduct<c, Loader, Activate<T, known>>;
  Sizes const& s = x.sizes;
  bool const halves = pairing == Pairing::halves;
  int64_t const columns = view.width;  // of gate where halves, else of the product
  int64_t const tile_n = halves ? c.tile_n / 2 : c.tile_n;
  typename Kernel::Params params{};
  params.work = {.groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
                 .tile_n = int(tile_n),
                 .across = int(ceil_div(columns, tile_n)),
                 .inner = int(s.hidden)};
  fill_rows<T, c>(params.load, x.x, x.routing, s, "x");
  auto const map = [&](ConstWeight const& w) {
    int64_t const stride = major == Major::K ? w.out_stride : w.in_stride;
    return weight_map<T, c, major>(w.data, s.experts, view.width, s.hidden, w.expert_stride, stride,
                                   "w_up");
  };
  params.load.b = {{map(view.w[0]), map(view.w[1])}, halves, INT32_MAX};
  auto& out = params.epilogue;
  out.h = row_output<T>(x.h, s.rows(), columns, view.halves, "h");
  out.a = row_output<T>(x.a, s.rows(), s.intermediate, 1, "a");
  out.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, columns * view.halves)};
  out.activation = activation_in<float>(x.activation);
  out.pairing = {pairing};
  launch<Kernel>(params, most_tiles<c>(s.rows(), s.experts, columns, tile_n), queue);
}

template <class T, GemmConfig c, Major major, bool gathered>
void launch_up_projection(UpProjection const& x, GateUpView<ConstWeight> const& view,
                          Queue const& queue) {
  Pairing const pairing = view.halves == 2 ? Pairing::halves
                          : view.alternate ? Pairing::alternate
                                           : Pairing::none;
  with_known(known_of(x.activation, pairing), [&](auto known) {
    launch_known<T, c, major, gathered, known.value>(x, view, pairing, queue);
  });
}

}  // namespace

void up_projection(UpProjection const& x, Queue queue) {
  check(x);
  require_layer(x.sizes, x.dtype);
  auto const view =
      gate_up_view(x.w_up, x.sizes, x.activation.gated, x.order, /*element_bytes=*/2, "w_up");
  for (ConstWeight const& w : view.w) require_aligned(w, "w_up");
  require_aligned(x.x, "x");
  require_aligned(x.bias, "b_up");
  require_aligned(x.h, "h");
  require_aligned(x.a, "a");
  if (x.sizes.rows() == 0) return;
  TileCount const count{.rows = x.sizes.rows(),
                        .groups = x.sizes.experts,
                        .columns = view.width * view.halves,
                        .inner = x.sizes.hidden,
                        .ragged = true};
  with_product(x.dtype, view.w[0].in_stride == 1, x.routing.row_token != nullptr,
               [&]<class T, Major major, bool gathered> {
                 with_config<Product::up>(count, [&]<GemmConfig c> {
                   launch_up_projection<T, c, major, gathered>(x, view, queue);
                 });
               });
}

}  // namespace guild::cuda
