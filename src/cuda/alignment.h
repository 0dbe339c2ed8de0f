// Arguments as the CUDA backend takes them, and its own requirements: 16-bit types, rows on 16-byte
// boundaries, a maximum number of experts.
#pragma once
#include <cstdint>

#include "guild/error.h"
#include "guild/steps.h"
#include "shared/dtype.h"
#include "shared/row_stride.h"

namespace guild::cuda {

inline void require_16_bit(DType dtype) {
  require(dtype == DType::bfloat16 || dtype == DType::float16,
          "dtype: expected bfloat16 or float16 on CUDA, got ",
          dtype == DType::float64 ? "float64" : "float32");
}

inline void require_whole_16_bytes(int64_t size, char const* name) {
  require(size % kElementsPer16Bytes == 0, name, ": expected a multiple of ", kElementsPer16Bytes,
          " on CUDA, got ", size);
}

// Requires data and its row stride (in elements) to be on 16-byte boundaries.
inline void require_aligned(void const* data, int64_t stride, char const* name) {
  auto const address = reinterpret_cast<uintptr_t>(data);
  require(address % 16 == 0, name, ": expected 16-byte aligned data on CUDA, got address ",
          address);
  require(stride % kElementsPer16Bytes == 0, name, ": expected rows a multiple of ",
          kElementsPer16Bytes, " elements apart on CUDA, got ", stride);
}
inline void require_aligned(ConstRows const& rows, char const* name) {
  if (rows.data != nullptr) require_aligned(rows.data, rows.stride, name);
}

// A row stride in units of 16 bytes: kernels that gather compute row offsets in them with 32 bits.
inline constexpr uint32_t kNone = ~0u;  // no row
inline uint32_t addressable_stride(int64_t rows, int64_t stride, char const* name) {
  int64_t const units = stride / kElementsPer16Bytes;
  require(rows * units < int64_t(kNone), name, ": expected fewer than 2^35 elements on CUDA, got ",
          rows, " rows ", stride, " apart");
  return uint32_t(units);
}

// Requires one of the two inner dimensions to be contiguous, the other on 16-byte boundaries.
inline void require_aligned(ConstWeight const& w, char const* name) {
  require(w.in_stride == 1 || w.out_stride == 1, name,
          ": expected one contiguous dimension on CUDA, got strides (", w.expert_stride, ", ",
          w.out_stride, ", ", w.in_stride, ")");
  require_aligned(w.data, w.in_stride == 1 ? w.out_stride : w.in_stride, name);
  require_aligned(w.data, w.expert_stride, name);
}

// What a kernel that gathers from rows requires of them, as addressable_stride() does.
inline void require_addressable(ConstRows const& rows, int64_t count, int64_t width,
                                char const* name) {
  addressable_stride(count, row_stride(rows, width), name);
}

// Rows, tokens and slots: kernels count up to 8,192 past the last one, which must be below 2^31.
inline constexpr int64_t kMostCounted = (int64_t(1) << 31) - 8192;
// Rows that a weight gradient sums over: clipped_map() addresses no more.
inline constexpr int64_t kMostSummedRows = int64_t(1) << 30;
inline void require_at_most(int64_t size, int64_t most, char const* name) {
  require(size <= most, name, ": expected at most ", most, " on CUDA, got ", size);
}

// The most experts that routing supports on CUDA; the CPU backend has no such limit.
inline constexpr int kMostRouted = 1024;
inline void require_routable(int64_t experts) {
  require(experts <= kMostRouted, "experts: expected at most ", kMostRouted, " on CUDA, got ",
          experts);
}

// What all products of a layer require of its sizes.
inline void require_layer(Sizes const& sizes, DType dtype) {
  require_16_bit(dtype);
  require_whole_16_bytes(sizes.hidden, "hidden");
  require_whole_16_bytes(sizes.intermediate, "intermediate");
  require_at_most(sizes.rows(), kMostCounted, "rows");
}

}  // namespace guild::cuda
