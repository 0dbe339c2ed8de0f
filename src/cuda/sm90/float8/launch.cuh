// Host side of the products of FP8 codes.
#pragma once
#include "cuda/sm90/float8/quantized_fragment.cuh"
#include "cuda/sm90/float8/scaled_kernel.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {

// A pair of blocks loads a third less from L2, as in kConfigs; it was measured to be the fastest.
inline constexpr GemmConfig kScaledConfig{.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2};

// Codes as the loaders see them, two in one element.
inline ConstRows in_pairs(ConstRows const& rows, int64_t columns) {
  return {rows.data, row_stride(rows, columns) / 2};
}
inline ConstWeight in_pairs(ConstWeight const& w) {
  return {w.data, w.expert_stride / 2, w.out_stride / 2, 1, w.expert_at};
}

template <bool gathered>
using CodeLoader = RowLoader<CodePair, kScaledConfig, Major::K, gathered>;

// A of a step of a layer: the rows of codes, or those of the tokens that are gathered.
template <bool gathered>
void fill_code_rows(typename CodeLoader<gathered>::Params& load, ConstRows const& codes,
                    Sizes const& s, int32_t const* row_token, char const* name) {
  RowOperand const rows{in_pairs(codes, s.hidden), s.rows(), s.tokens, s.hidden / 2, row_token};
  fill_rows<CodePair, kScaledConfig, Major::K>(load, rows, name);
}

// Calls f(std::integral_constant<Codes, codes>{}).
template <class F>
void with_codes(Float8 a_format, F&& f) {
  if (a_format == Float8::e4m3) {
    f(std::integral_constant<Codes, Codes::e4m3_e4m3>{});
  } else {
    f(std::integral_constant<Codes, Codes::e5m2_e4m3>{});
  }
}

// Results by row in one or two halves of `columns` elements of two bytes, stored by warps; absent
// where data is null.
inline WarpRows warp_rows(Rows const& rows, int64_t count, int64_t columns, int halves,
                          char const* name) {
  WarpRows out{};
  if (rows.data == nullptr) return out;
  out.map = output_map<CodePair>(rows, count, columns, halves, 16, name);
  out.present = true;
  return out;
}

// Results by row, elements of `bytes`; absent where data is null.
inline ByteRows byte_rows(Rows const& rows, int64_t columns, int bytes) {
  return {static_cast<char*>(rows.data), row_stride(rows, columns) * bytes};
}

// Codes in `halves` parts of `columns` columns.
inline CodeOutput code_output(Rows const& codes, Scales const& scales, int64_t columns, int halves,
                              Float8 format, ScaleKind kind) {
  return {byte_rows(codes, halves * columns, 1), scales, int(columns),
          int(ceil_div(columns, kScaleBlock)),   format, kind};
}

template <class Kernel>
void launch_scaled(typename Kernel::Params& params, int64_t rows, Queue const& queue) {
  params.rows = int(rows);
  launch<Kernel>(params, most_tiles<kScaledConfig>(rows, params.work), queue);
}

}  // namespace guild::cuda
