// What the products of FP8 codes require of their arguments: operands that TMA can load.
#pragma once
#include "cuda/alignment.h"
#include "shared/float8.h"

namespace guild::cuda {

inline constexpr int64_t kCodesPer16Bytes = 16;

inline void require_codes_width(int64_t size, char const* name) {
  require(size % kCodesPer16Bytes == 0, name, ": expected a multiple of ", kCodesPer16Bytes,
          " on CUDA, got ", size);
}

// Data and strides, in codes, on 16-byte boundaries.
inline void require_codes(void const* data, int64_t stride, int64_t matrix_stride,
                          char const* name) {
  bool const aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                       stride % kCodesPer16Bytes == 0 && matrix_stride % kCodesPer16Bytes == 0;
  require(aligned, name, ": expected 16-byte aligned data and strides on CUDA, got strides (",
          matrix_stride, ", ", stride, ") at address ", data);
}
inline void require_codes(ConstRows const& rows, char const* name) {
  if (rows.data != nullptr) require_codes(rows.data, rows.stride, 0, name);
}
// A weight whose products run over `in`, which is contiguous.
inline void require_codes(ConstWeight const& w, int64_t experts, char const* name) {
  bool const one = experts == 1 && w.expert_at == nullptr;
  require_codes(w.data, w.out_stride, one ? 0 : w.expert_stride, name);
}

// Scales (matrices, rows, columns), whose elements kernels count with 32 bits.
inline void require_scales(ConstScales const& s, int64_t matrices, int64_t rows, int64_t columns,
                           char const* name) {
  int64_t const last =
      (matrices - 1) * s.expert_stride + (rows - 1) * s.row_stride + (columns - 1) * s.col_stride;
  require(last < int64_t(1) << 32, name,
          ": expected fewer than 2^32 elements on CUDA, got strides (", s.expert_stride, ", ",
          s.row_stride, ", ", s.col_stride, ")");
}

inline void require_e4m3(Float8 format, char const* name) {
  require(format == Float8::e4m3, name, ": expected 0 (e4m3) on CUDA, got 1 (e5m2)");
}

}  // namespace guild::cuda
