// The weight gradients of quantised chunks: how their results are stored, and their launch.
#include "cuda/sm90/float8/chunk_product.h"

#include <utility>

#include "cuda/sm90/expert_matrices.cuh"
#include "cuda/sm90/float8/chunk_kernel.cuh"
#include "cuda/sm90/float8/launch.cuh"

namespace guild::cuda::sm90 {
namespace {

CUtensorMap chunk_map(ConstChunks const& x, int64_t columns, int64_t slots, int box_rows,
                      char const* name) {
  constexpr int64_t pairs = kScaleBlock / 2;
  int64_t const slot = x.slot_stride == 0 ? columns * kScaleBlock : x.slot_stride;
  return tensor_map(x.codes, DType::bfloat16,
                    {pairs, columns, slots, pairs, slot / 2, int(pairs), box_rows, 1}, name);
}

template <Codes codes, class Epilogue>
void launch_chunks(ChunkProduct const& x, Epilogue const& epilogue, Queue const& queue) {
  using Kernel = ChunkSums<kScaledConfig, Epilogue, codes>;
  int64_t const slots = chunk_slots(x.rows, x.groups);
  typename Kernel::Params params{};
  ChunkTiles& work = params.work;
  work.groups = expert_groups(x.offsets, x.groups, x.rows);
  work.tile_n = kScaledConfig.tile_n;
  work.rows = int(x.out);
  work.across = int(ceil_div(x.in, kScaledConfig.tile_n));
  params.load.a = chunk_map(x.a, x.out, slots, 64, "a");
  params.load.b = chunk_map(x.b, x.in, slots, ChunkColumns<kScaledConfig>::kBoxRows, "b");
  params.epilogue = epilogue;
  params.a_scales = x.a.scales;
  params.b_scales = x.b.scales;
  params.b_blocks = int(ceil_div(x.in, kScaleBlock));
  params.accumulate = x.accumulate;
  launch<Kernel>(params, x.groups * ceil_div(x.out, kScaledConfig.cluster_m()) * work.across,
                 queue);
}

template <class Epilogue>
void launch_format(ChunkProduct const& x, Epilogue const& epilogue, Queue const& queue) {
  with_codes(x.a_format, [&](auto codes) { launch_chunks<codes.value>(x, epilogue, queue); });
}

// The same product with its operands exchanged, if that makes D contiguous along its columns and is
// possible.
ChunkProduct along_columns(ChunkProduct x) {
  if (x.d.in_stride == 1 || x.d.out_stride != 1 || x.a_format != Float8::e4m3) return x;
  std::swap(x.a, x.b);
  std::swap(x.out, x.in);
  std::swap(x.d.out_stride, x.d.in_stride);
  return x;
}

}  // namespace

void chunk_product(ChunkProduct const& product, Queue const& queue) {
  ChunkProduct const x = along_columns(product);
  ExpertMatrices const matrices{x.d, x.d_dtype, x.accumulate, x.groups, x.out, x.in};
  DirectOutput const d = matrices.direct();
  if (stores_floats<Along::columns>(d)) {
    return launch_format(x, StoreFloats<Along::columns>{d}, queue);
  }
  with_type(x.d_dtype, [&](auto element) {
    using T = decltype(element);
    if (matrices.have_boxes() && x.d_dtype != DType::float32 && !x.accumulate) {
      StoreAtOnce<T, StoreExpert> const boxes{matrices.boxes<T>("out")};
      return launch_format(x, boxes, queue);
    }
    launch_format(x, StoreDirect<T>{d, {}}, queue);
  });
}

}  // namespace guild::cuda::sm90
