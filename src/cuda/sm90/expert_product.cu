#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/products.h"
#include "cuda/sm90/store_floats.cuh"

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

// Where TMA can write the expert's matrices.
bool has_boxes(ExpertProduct const& x) {
  bool const transposed = x.d.in_stride != 1;
  return x.d_dtype == x.dtype && !x.accumulate && x.d.expert_stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.d.data) % 16 == 0 &&
         (transposed ? x.d.out_stride == 1 && x.d.in_stride % 8 == 0 : x.d.out_stride % 8 == 0);
}

template <class T>
StoreExpert<T> boxes_of_experts(ExpertProduct const& x) {
  bool const transposed = x.d.in_stride != 1;
  constexpr int box = kBoxColumns;
  int64_t const z = places(x.d, x.groups.groups);
  MapShape const shape = transposed
                             ? MapShape{x.m, x.n, z, x.d.in_stride, x.d.expert_stride, box, 64, 1}
                             : MapShape{x.n, x.m, z, x.d.out_stride, x.d.expert_stride, box, 64, 1};
  return {tensor_map(x.d.data, x.dtype, shape, "dw"), transposed, int(x.n), x.d.expert_at};
}

}  // namespace

void expert_product(ExpertProduct const& x, Queue const& queue) {
  TileCount const count{.rows = x.m,
                        .groups = x.groups.groups,
                        .columns = x.n,
                        .inner = x.rows / x.groups.groups,
                        .ragged = false};
  DirectOutput const d{.data = x.d.data,
                       .group_stride = x.d.expert_stride,
                       .row_stride = x.d.out_stride,
                       .col_stride = x.d.in_stride,
                       .is_float = x.d_dtype == DType::float32,
                       .accumulate = x.accumulate,
                       .columns = int(x.n),
                       .group_at = x.d.expert_at};
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    with_config<Product::experts>(count, [&]<GemmConfig c> {
      if (has_boxes(x)) {
        launch_expert_product<T, c>(x, boxes_of_experts<T>(x), queue);
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
