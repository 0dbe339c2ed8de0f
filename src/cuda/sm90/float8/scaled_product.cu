#include "cuda/sm90/float8/scaled_kernel.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

// A pair of blocks loads a third less from L2, as in kConfigs; it is what was measured fastest.
constexpr GemmConfig kConfig{.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2};

template <Codes codes, class Epilogue>
void launch_scaled(ScaledRowProduct const& x, Epilogue const& epilogue, Queue const& queue) {
  // The loaders see two codes as one element.
  using Pair = __nv_bfloat16;
  int64_t const pairs = x.k / 2;
  using Kernel = ScaledProduct<kConfig, TmaRows<Pair, kConfig, Major::K>, Epilogue, codes>;
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = kConfig.tile_n,
                 .across = int(ceil_div(x.n, kConfig.tile_n)),
                 .inner = int(pairs)};
  ConstRows const a{x.a.data, row_stride(x.a, x.k) / 2};
  ConstWeight const b{x.b.data, x.b.expert_stride / 2, x.b.out_stride / 2, 1};
  params.load.a = row_map<Pair>(a, x.rows, pairs, 1, 64, "a");
  params.load.b = weight_loader<Pair, kConfig, Major::K>(
      b, b, x.groups.groups, x.n, pairs, false, int(ceil_div(pairs, kConfig.tile_k)), "b");
  params.epilogue = epilogue;
  params.a_scales = x.a_scales;
  params.b_scales = x.b_scales;
  params.rows = int(x.rows);
  params.n_blocks = int(ceil_div(x.n, kScaleBlock));
  launch<Kernel>(params, most_tiles<kConfig>(x.rows, params.work), queue);
}

}  // namespace

void scaled_row_product(ScaledRowProduct const& x, Queue const& queue) {
  if (x.rows == 0) return;
  auto const launch_with = [&](auto const& epilogue) {
    if (x.a_format == Float8::e4m3) {
      launch_scaled<Codes::e4m3_e4m3>(x, epilogue, queue);
    } else {
      launch_scaled<Codes::e5m2_e4m3>(x, epilogue, queue);
    }
  };
  with_type(x.out_dtype, [&](auto element) {
    using T = decltype(element);
    if (x.direct.data != nullptr) {
      launch_with(StoreDirect<T>{x.direct, {}});
    } else {
      launch_with(StoreRowsAtOnce<T>{{row_output<T>(x.d, x.rows, x.n, 1, "d"), {}}});
    }
  });
}

}  // namespace guild::cuda::sm90
