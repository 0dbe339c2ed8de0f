// Host side of the up projection: what its kernels are launched with.
#pragma once
#include "cuda/sm90/activate.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {

template <class Kernel, class T, GemmConfig c, Major major>
typename Kernel::Params up_params(UpProduct const& x) {
  bool const halves = x.pairing == Pairing::halves;
  int64_t const columns = x.pairing == Pairing::alternate ? 2 * x.n : x.n;  // of a half, or of all
  int64_t const tile_n = halves ? c.tile_n / 2 : c.tile_n;
  int const count = halves ? 2 : 1;
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = int(tile_n),
                 .across = int(ceil_div(columns, tile_n)),
                 .inner = int(x.k)};
  fill_rows<T, c, major>(params.load, {x.a, x.rows, x.tokens, x.k, x.row_token}, "x");
  params.load.b = weight_loader<T, c, major>(x.w[0], x.w[1], x.groups.groups, columns, x.k, halves,
                                             INT32_MAX, "w_up");
  auto& out = params.epilogue;
  out.h_rows = int(x.h_rows < 0 ? x.rows : x.h_rows);
  out.h = row_output<T>(x.h, out.h_rows, columns, count, "h");
  out.a = row_output<T>(x.activated, x.rows, x.n, 1, "a");
  out.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, columns * count)};
  out.activation = activation_in<float>(x.activation);
  out.pairing = {x.pairing};
  return params;
}

}  // namespace guild::cuda
