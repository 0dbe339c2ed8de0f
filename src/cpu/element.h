// The element types of the CPU backend, and how rows of them become the type they are computed in.
//
// float64 is computed in float64, everything else in float32. 16-bit values exist only in memory:
// load() and store() convert whole rows, rounding to the nearest even.
#pragma once
#include <cstdint>
#include <type_traits>

#include "guild/types.h"

namespace guild::cpu {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// out[i] = in[i * stride]
template <class T>
void load(T const* in, int64_t stride, Compute<T>* out, int64_t count);

// out[i * stride] = in[i], or += where added (16-bit types are summed in fp32)
template <class T, class F>
void store(F const* in, T* out, int64_t stride, int64_t count, bool add = false);

// Calls body.template operator()<T>() with the type that dtype names.
template <class Body>
decltype(auto) with_element(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::bfloat16:
      return body.template operator()<bf16>();
    case DType::float16:
      return body.template operator()<fp16>();
    case DType::float64:
      return body.template operator()<double>();
    default:
      return body.template operator()<float>();
  }
}

// The same for two types, the second being the first or float32: of weights and their gradient.
template <class Body>
decltype(auto) with_elements(DType dtype, DType out, Body&& body) {
  return with_element(dtype, [&]<class T>() -> decltype(auto) {
    return out == dtype ? body.template operator()<T, T>() : body.template operator()<T, float>();
  });
}

}  // namespace guild::cpu
