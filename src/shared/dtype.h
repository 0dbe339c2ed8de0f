// Properties of element types.
#pragma once
#include "guild/types.h"

namespace guild {

constexpr int64_t element_bytes(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

// The type of the scores, and of sums by token, in a layer of this type.
constexpr DType score_dtype(DType dtype) {
  return dtype == DType::float64 ? DType::float64 : DType::float32;
}

// Bytes of a matrix element on the GPU, bfloat16 or float16: no other types have kernels there.
inline constexpr int kElementBytes = 2;
// 16 bytes: the widest load of a thread, and the granularity of row strides that TMA requires.
inline constexpr int kElementsPer16Bytes = 16 / kElementBytes;

}  // namespace guild
