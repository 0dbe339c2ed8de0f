// The grouped product of codes by row: how its results are stored, and its launch.
#include "cuda/float8/scaled_products.h"
#include "cuda/sm90/float8/launch.cuh"
#include "cuda/sm90/float8/store_at_once.cuh"

namespace guild::cuda {
namespace {

template <Codes codes, class Epilogue>
void launch_rows(ScaledRowProduct const& x, Epilogue const& epilogue, Queue const& queue) {
  using Loader = CodeLoader<false>;
  using Kernel = ScaledProduct<kScaledConfig, Loader, Epilogue, codes>;
  constexpr GemmConfig c = kScaledConfig;
  int64_t const pairs = x.k / 2;
  int const half_steps = int(ceil_div(pairs, c.tile_k));
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(x.n, c.tile_n)),
                 .inner = int(x.halves) * half_steps * c.tile_k};
  ConstWeight const first = in_pairs(x.b);
  ConstWeight second = first;
  if (x.halves == 2) second.data = static_cast<char const*>(x.b.data) + x.k;
  params.load.a =
      row_map<CodePair>(in_pairs(x.a, x.halves * x.k), x.rows, pairs, int(x.halves), 64, "a");
  params.load.b = weight_loader<CodePair, c, Major::K>(first, second, x.groups.groups, x.n, pairs,
                                                       false, half_steps, "b");
  params.epilogue = epilogue;
  params.a_scales = x.a_scales;
  params.b_scales = x.b_scales;
  params.n_blocks = int(ceil_div(x.n, kScaleBlock));
  launch_scaled<Kernel>(params, x.rows, queue);
}

}  // namespace

void scaled_row_product(ScaledRowProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  with_type(x.element, [&](auto element) {
    using T = decltype(element);
    Bias<T> const bias{static_cast<T const*>(x.bias.data), row_stride(x.bias, x.n)};
    with_codes(x.a_format, [&](auto codes) {
      if (x.direct.data != nullptr) {
        launch_rows<codes.value>(x, StoreDirect<T>{x.direct, bias}, queue);
      } else {
        StoreRows<T> const rows{row_output<T>(x.d, x.rows, x.n, 1, "d"), bias};
        launch_rows<codes.value>(x, StoreAtOnce<T, StoreRows>{rows}, queue);
      }
    });
  });
}

}  // namespace guild::cuda
