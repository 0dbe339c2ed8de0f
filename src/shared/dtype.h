// What follows from an element type.
#pragma once
#include "guild/types.h"

namespace guild {

constexpr int64_t element_bytes(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

// Of the scores, and of what is summed by token, of a layer of this type.
constexpr DType score_dtype(DType dtype) {
  return dtype == DType::float64 ? DType::float64 : DType::float32;
}

// Of a matrix element on the GPU, bfloat16 or float16: nothing else has kernels there.
inline constexpr int kElementBytes = 2;
// What a thread moves at once, and what TMA asks rows to be a multiple of, is 16 bytes.
inline constexpr int kElementsPer16Bytes = 16 / kElementBytes;

}  // namespace guild
