// Host side of the down gradient of FP8 codes: what its kernels are launched with.
#pragma once
#include "cuda/gate_up.h"
#include "cuda/sm90/float8/launch.cuh"
#include "cuda/sm90/float8/scaled_down_gradient.cuh"
#include "guild/float8_chunks.h"

namespace guild::cuda {

// H in boxes of 64 columns.
template <class T>
CUtensorMap h_map(ScaledDownGradient const& x, Pairing pairing) {
  Sizes const& s = x.sizes;
  int64_t const columns = s.intermediate;
  int const halves = x.activation.gated ? 2 : 1;
  if (x.h.data == nullptr) {
    ConstRows const pairs = in_pairs(x.h_codes, halves * columns);
    MapShape const shape{columns / 2, halves, s.rows(), columns / 2, pairs.stride, 32, 1, 64};
    return tensor_map(pairs.data, dtype_of<CodePair>(), shape, "h_codes");
  }
  bool const apart = pairing == Pairing::halves;
  return row_map<T>(x.h, s.rows(), apart ? columns : halves * columns, apart ? 2 : 1, 64, "h");
}

inline ChunkOutput chunk_output(Chunks const& chunks, Sizes const& s, int halves,
                                char const* name) {
  int64_t const columns = s.intermediate, slots = chunk_slots(s.rows(), s.experts);
  ChunkOutput out{};
  if (chunks.codes == nullptr) return out;
  return {turned_map(chunks.codes, columns, halves, slots, name),
          chunks.codes,
          chunks.scales,
          int(columns),
          int(ceil_div(columns, kScaleBlock)),
          halves};
}

template <class T, StaticActivation known, bool of_codes>
ScaledDownGradientEpilogue<T, known, of_codes> epilogue_of(ScaledDownGradient const& x,
                                                           Pairing pairing) {
  Sizes const& s = x.sizes;
  int64_t const columns = s.intermediate;
  int const halves = x.activation.gated ? 2 : 1;
  ScaledDownGradientEpilogue<T, known, of_codes> out{};
  out.hidden = {h_map<T>(x, pairing),
                x.h_scales,
                int(columns),
                int(ceil_div(columns, kScaleBlock)),
                {pairing}};
  out.columns = int(columns);
  out.dh_codes = code_output(x.dh_codes, x.dh_scales, columns, halves, x.format, x.scale);
  out.dh.columns = int(columns);
  if (pairing == Pairing::alternate) {
    out.dh.pairs = byte_rows(x.dh, halves * columns, sizeof(T));
  } else {
    out.dh.halves = warp_rows(x.dh, s.rows(), columns, halves, "dh");
  }
  out.a = warp_rows(x.a_scaled, s.rows(), columns, 1, "a_scaled");
  out.dh_chunks = chunk_output(x.dh_chunks, s, halves, "dh_chunks");
  out.a_chunks = chunk_output(x.a_chunks, s, 1, "a_chunks");
  out.groups = expert_groups(x.routing.offsets, s.experts, s.rows());
  out.score = static_cast<float const*>(x.routing.row_score);
  out.parts = static_cast<float*>(x.score_parts);
  out.part_count = int(ceil_div(columns, kScoreColumns));
  out.activation = activation_in<float>(x.activation);
  return out;
}

template <class T, bool gathered, StaticActivation known, bool of_codes, Codes codes>
void launch_kernel(ScaledDownGradient const& x, Pairing pairing, Queue const& queue) {
  constexpr GemmConfig c = kScaledConfig;
  using Epilogue = ScaledDownGradientEpilogue<T, known, of_codes>;
  using Kernel = ScaledProduct<c, CodeLoader<gathered>, Epilogue, codes>;
  Sizes const& s = x.sizes;
  int64_t const columns = s.intermediate, pairs = s.hidden / 2;
  typename Kernel::Params params{};
  params.work = {.groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(columns, c.tile_n)),
                 .inner = int(ceil_div(pairs, c.tile_k)) * c.tile_k};
  fill_code_rows<gathered>(params.load, x.dout, s, x.routing.row_token, "dout");
  ConstWeight const w = in_pairs(transposed(x.w_down));
  params.load.b = weight_loader<CodePair, c, Major::K>(w, w, s.experts, columns, pairs, false,
                                                       INT32_MAX, "w_down");
  params.a_scales = x.dout_scales;
  params.b_scales = {x.w_scales.data, x.w_scales.expert_stride, x.w_scales.col_stride,
                     x.w_scales.row_stride};
  params.n_blocks = int(ceil_div(columns, kScaleBlock));
  params.epilogue = epilogue_of<T, known, of_codes>(x, pairing);
  launch_scaled<Kernel>(params, s.rows(), queue);
}

// For the element type, the loader of dO and the formats that x has.
template <StaticActivation known, bool of_codes>
void launch_scaled_down_gradient(ScaledDownGradient const& x, Pairing pairing, Queue const& queue) {
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    with_codes(x.dout_format, [&](auto codes) {
      if (x.routing.row_token != nullptr) {
        launch_kernel<T, true, known, of_codes, codes.value>(x, pairing, queue);
      } else {
        launch_kernel<T, false, known, of_codes, codes.value>(x, pairing, queue);
      }
    });
  });
}

}  // namespace guild::cuda
