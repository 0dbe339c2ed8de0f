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

}  // namespace guild
