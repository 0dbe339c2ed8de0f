// Host side of the down gradient: what its kernels are launched with.
#pragma once
#include "cuda/sm90/down_gradient.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {

template <class Kernel, class T, GemmConfig c, Major major>
typename Kernel::Params down_gradient_params(DownGradientProduct const& x) {
  int const halves = x.pairing == Pairing::halves ? 2 : 1;
  int64_t const width = x.n * (x.pairing == Pairing::alternate ? 2 : 1);
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(x.n, c.tile_n)),
                 .inner = int(x.k)};
  fill_rows<T, c, major>(params.load, {x.a, x.rows, x.tokens, x.k, x.row_token}, "dout");
  params.load.b =
      weight_loader<T, c, major>(x.w, x.w, x.groups.groups, x.n, x.k, false, INT32_MAX, "w_down");
  auto& out = params.epilogue;
  out.h = row_map<T>(x.h, x.h_rows < 0 ? x.rows : x.h_rows, width, halves, 64, "h");
  if (x.h_again.data != nullptr) {
    out.h_again = row_map<T>(x.h_again, x.rows, width, halves, 64, "h_again");
    out.needed = x.needed;
    out.h_rows = int(x.h_rows);
  }
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
  return params;
}

}  // namespace guild::cuda
