// With g = dO[row_token] W2: dH = d activation(s g, H), A' = s A, parts of dS = <g, A>; where they
// are wanted, db1 and db2 from sums over 64 rows each
#include "cuda/sm90/down_gradient.cuh"

#include "check.h"
#include "cuda/alignment.h"
#include "cuda/rows/bias_sums.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {
namespace {

template <class T, GemmConfig c, Major major, bool gathered, Known known>
void launch_known(DownGradient const& x, BiasSums const& sums, Pairing pairing,
                  Queue const& queue) {
  using Loader = RowLoader<T, c, major, gathered>;
  using Kernel = GroupedProduct<c, Loader, DownGradientEpilogue<T, known>>;
  Sizes const& s = x.sizes;
  int const halves = pairing == Pairing::halves ? 2 : 1;
  int64_t const width = s.intermediate * (pairing == Pairing::alternate ? 2 : 1);
  typename Kernel::Params params{};
  params.work = {.groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(s.intermediate, c.tile_n)),
                 .inner = int(s.hidden)};
  fill_rows<T, c>(params.load, x.dout, x.routing, s, "dout");
  ConstWeight const& w = x.w_down;
  CUtensorMap const map =
      weight_map<T, c, major>(w.data, s.experts, s.intermediate, s.hidden, w.expert_stride,
                              major == Major::K ? w.in_stride : w.out_stride, "w_down");
  params.load.b = {{map, map}, false, INT32_MAX};
  auto& out = params.epilogue;
  out.h = row_map<T>(x.h, s.rows(), width, halves, c.tile_m, "h");
  out.dh = row_output<T>(x.dh, s.rows(), width, halves, "dh");
  out.a = row_output<T>(x.a_scaled, s.rows(), s.intermediate, 1, "a_scaled");
  out.score = static_cast<float const*>(x.routing.row_score);
  out.parts = static_cast<float*>(x.score_parts);
  out.part_count = int(score_parts(s));
  out.dh_sums = x.db_up.data != nullptr ? static_cast<float*>(sums.dh) : nullptr;
  out.dout_sums = x.db_down.data != nullptr ? static_cast<float*>(sums.dout) : nullptr;
  out.hidden = int(s.hidden);
  out.activation = activation_in<float>(x.activation);
  out.pairing = {pairing};
  launch<Kernel>(params, most_tiles<c>(s.rows(), s.experts, s.intermediate, c.tile_n), queue);
}

template <class T, GemmConfig c, Major major, bool gathered>
void launch_down_gradient(DownGradient const& x, BiasSums const& sums, Queue const& queue) {
  Pairing const pairing = !x.activation.gated              ? Pairing::none
                          : x.order == GateUp::interleaved ? Pairing::alternate
                                                           : Pairing::halves;
  with_known(known_of(x.activation, pairing), [&](auto known) {
    launch_known<T, c, major, gathered, known.value>(x, sums, pairing, queue);
  });
}

void launch_products(DownGradient const& x, BiasSums const& sums, Queue const& queue) {
  TileCount const count{.rows = x.sizes.rows(),
                        .groups = x.sizes.experts,
                        .columns = x.sizes.intermediate,
                        .inner = x.sizes.hidden,
                        .ragged = true};
  with_product(x.dtype, x.w_down.out_stride == 1 && x.w_down.in_stride != 1,
               x.routing.row_token != nullptr, [&]<class T, Major major, bool gathered> {
                 with_config<Product::down_gradient>(count, [&]<GemmConfig c> {
                   launch_down_gradient<T, c, major, gathered>(x, sums, queue);
                 });
               });
}

}  // namespace

void down_gradient(DownGradient const& x, Queue queue) {
  check(x);
  require_layer(x.sizes, x.dtype);
  require_aligned(x.w_down, "w_down");
  require_aligned(x.dout, "dout");
  require_aligned(x.h, "h");
  require_aligned(x.dh, "dh");
  require_aligned(x.a_scaled, "a_scaled");
  Carver carver(x.workspace);
  BiasSums const sums = carve_bias_sums(carver, x.sizes, x.activation.gated);
  if (x.sizes.rows() > 0) launch_products(x, sums, queue);
  if (wants_biases(x)) add_bias_sums(x, sums, queue);
}

}  // namespace guild::cuda
