// Conditions on formats, scales and codes, from which the checks of FP8 steps are built.
#pragma once
#include "checks/conditions.h"
#include "shared/float8.h"

namespace guild {

inline void check_format(Float8 format, char const* name) {
  require(format == Float8::e4m3 || format == Float8::e5m2, name,
          ": expected 0 (e4m3) or 1 (e5m2), got ", int(format));
}

inline void check_element(DType dtype, char const* name) {
  check_dtype(dtype, name);
  require(dtype != DType::float64, name, ": expected bfloat16, float16 or float32, got float64");
}

// Scales (experts, rows, columns), which may repeat.
template <class F>
void check_scales(BlockScales<F> const& scales, bool needed, std::array<int64_t, 3> sizes,
                  char const* name) {
  check_pointer(scales.data, needed, name);
  require(scales.expert_stride >= 0 && scales.row_stride >= 0 && scales.col_stride >= 0, name,
          ": expected strides of at least 0, got (", scales.expert_stride, ", ", scales.row_stride,
          ", ", scales.col_stride, ")");
  auto const& [experts, rows, columns] = sizes;
  check_reach(
      {{{experts, scales.expert_stride}, {rows, scales.row_stride}, {columns, scales.col_stride}}},
      name);
}

// Scales that are written, (experts, rows, columns): no two blocks share an element.
inline void check_output_scales(Scales const& scales, int64_t experts, int64_t rows,
                                int64_t columns, char const* name) {
  check_scales(scales, experts * rows > 0, {experts, rows, columns}, name);
  require(lie_apart({{{experts, scales.expert_stride},
                      {rows, scales.row_stride},
                      {columns, scales.col_stride}}}),
          name, ": expected strides of scales that do not overlap, ", experts, " of ", rows, " x ",
          columns, ", got (", scales.expert_stride, ", ", scales.row_stride, ", ",
          scales.col_stride, ")");
}

// A weight's codes for products that sum over `in`.
inline void check_codes(ConstWeight const& w, int64_t experts, int64_t out, int64_t in,
                        char const* name) {
  check_weight(w, experts, out, in, name, false);
  require(w.in_stride == 1 || in == 1, name, ": expected H contiguous, got stride ", w.in_stride);
}

inline void check_kind(ScaleKind kind) {
  require(kind == ScaleKind::exact || kind == ScaleKind::power_of_two,
          "scale: expected 0 (exact) or 1 (power of two), got ", int(kind));
}

}  // namespace guild
