// Arguments of ops with quantised operands: formats, codes and scales.
#pragma once
#include "shared/float8.h"
#include "torch/tensors.h"

namespace guild::binding {

inline Float8 float8_of(int64_t format, char const* name) {
  require(format == 0 || format == 1, name, ": expected 0 (e4m3) or 1 (e5m2), got ", format);
  return Float8(format);
}

inline ScaleKind scale_kind_of(int64_t kind) {
  require(kind == 0 || kind == 1, "scale: expected 0 (exact) or 1 (power of two), got ", kind);
  return ScaleKind(kind);
}

inline Scales scales_of(Place const& place, Tensor const& t, char const* name, Shape shape) {
  auto* const data = static_cast<float*>(place.typed(t, name, DType::float32, shape));
  int64_t const d = t.dim();
  return {data, d == 3 ? t.stride(0) : 0, t.stride(d - 2), t.stride(d - 1)};
}

inline ConstScales as_read(Scales const& s) {
  return {s.data, s.expert_stride, s.row_stride, s.col_stride};
}

// Rows of codes with contiguous columns. A row stride of 0 is rejected: steps would read packed
// rows.
inline Rows codes_of(Place const& place, Tensor const& t, char const* name, int64_t rows,
                     int64_t columns) {
  void* const data = place.bytes(t, name, {rows, columns});
  require(columns <= 1 || t.stride(1) == 1, name,
          ": expected contiguous columns (stride 1), got stride ", t.stride(1));
  require(rows <= 1 || t.stride(0) >= columns, name,
          ": expected rows that do not overlap, got strides (", t.stride(0), ", ", t.stride(1),
          ")");
  return {data, rows <= 1 ? 0 : t.stride(0)};
}

}  // namespace guild::binding
