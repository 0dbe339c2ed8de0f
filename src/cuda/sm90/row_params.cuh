// Host side of the products of plain rows: what their kernels are launched with.
#pragma once
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {

template <class Kernel, class T, GemmConfig c, Major major, class Epilogue>
typename Kernel::Params row_params(RowProduct const& x, Epilogue const& epilogue) {
  int const half_steps = int((x.k + c.tile_k - 1) / c.tile_k);
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(x.n, c.tile_n)),
                 .inner = x.halves * half_steps * c.tile_k};
  params.load.a = row_map<T>(x.a, x.rows, x.k, x.halves, 64, "a");
  auto const map = [&](ConstWeight const& w) {
    return weight_map<T, c, major>(w, x.groups.groups, x.n, x.k, "weight");
  };
  params.load.b = {{map(x.w[0]), map(x.w[x.halves - 1])}, false, half_steps};
  params.epilogue = epilogue;
  return params;
}

}  // namespace guild::cuda
