// The weight gradients: how their results are stored, and their launch.
#include "cuda/sm90/expert_matrices.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

template <class T, GemmConfig c, class Epilogue>
void launch_expert_product(ExpertProduct const& x, Epilogue const& epilogue, Queue const& queue) {
  using Kernel = GroupedProduct<c, TokenColumns<T, c>, Epilogue>;
  typename Kernel::Params params{};
  params.work = {.groups = x.groups,
                 .tile_n = c.tile_n,
                 .rows = int(x.m),
                 .across = int(ceil_div(x.n, c.tile_n))};
  params.work.order = x.schedule.order;
  params.work.taken = x.schedule.taken;
  auto& load = params.load;
  load.row = x.row_token;
  if (x.row_token == nullptr) {
    load.a_map = clipped_map<T>(x.a, x.rows, x.m, "a");
  } else {
    load.a = static_cast<T const*>(x.a.data);
    load.tokens = int(x.tokens);
    load.a_stride = addressable_stride(x.tokens, row_stride(x.a, x.m), "x or dout");
    load.m = int(x.m);
  }
  load.b_map = clipped_map<T>(x.b, x.rows, x.n, "b");
  params.epilogue = epilogue;
  launch<Kernel>(params, x.groups.groups * ceil_div(x.m, c.cluster_m()) * params.work.across,
                 queue);
}

}  // namespace

void expert_product(ExpertProduct const& x, Queue const& queue) {
  TileCount const count{.rows = x.m,
                        .groups = x.groups.groups,
                        .columns = x.n,
                        .inner = x.rows / x.groups.groups,
                        .ragged = false};
  ExpertMatrices const matrices{x.d, x.d_dtype, x.accumulate, x.groups.groups, x.m, x.n};
  DirectOutput const d = matrices.direct();
  bool const adds = x.accumulate && matrices.have_boxes();
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    with_config<Product::experts>(count, [&]<GemmConfig c> {
      if (adds && d.is_float) {
        launch_expert_product<T, c>(x, matrices.addends<float>("dw"), queue);
      } else if (adds) {
        launch_expert_product<T, c>(x, matrices.addends<T>("dw"), queue);
      } else if (matrices.have_boxes() && !d.is_float) {
        launch_expert_product<T, c>(x, matrices.boxes<T>("dw"), queue);
      } else if (stores_floats<Along::columns>(d)) {
        launch_expert_product<T, c>(x, StoreFloats<Along::columns>{d}, queue);
      } else if (stores_floats<Along::rows>(d)) {
        launch_expert_product<T, c>(x, StoreFloats<Along::rows>{d}, queue);
      } else {
        launch_expert_product<T, c>(x, StoreDirect<T>{d, {}}, queue);
      }
    });
  });
}

}  // namespace guild::cuda::sm90
