// Host side of the products of plain rows: what their kernels are launched with.
#pragma once
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {

template <class Kernel, class T, GemmConfig c, Major major, class Epilogue>
typename Kernel::Params row_params(RowProduct const& x, Epilogue const& epilogue) {
  int const half_steps = int(ceil_div(x.k, c.tile_k));
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(x.n, c.tile_n)),
                 .inner = x.halves * half_steps * c.tile_k};
  params.load.a = row_map<T>(x.a, x.rows, x.k, x.halves, 64, "a");
  params.load.b = weight_loader<T, c, major>(x.w[0], x.w[x.halves - 1], x.groups.groups, x.n, x.k,
                                             false, half_steps, "weight");
  params.epilogue = epilogue;
  return params;
}

}  // namespace guild::cuda
