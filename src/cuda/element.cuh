// The element types of the kernels: pairs in a word, eight at a time as the memory-bound kernels
// move them, and single results.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "shared/dtype.h"

namespace guild::cuda {

template <class T>
constexpr DType dtype_of() {
  return std::is_same_v<T, __half> ? DType::float16 : DType::bfloat16;
}

// Calls f with the 16-bit element type of `dtype`.
template <class F>
void with_type(DType dtype, F&& f) {
  if (dtype == DType::float16) {
    f(__half());
  } else {
    f(__nv_bfloat16());
  }
}

template <class T>
__device__ inline uint32_t pack(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    auto const v = __floats2half2_rn(x, y);
    return reinterpret_cast<uint32_t const&>(v);
  } else {
    auto const v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<uint32_t const&>(v);
  }
}

template <class T>
__device__ inline float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<__half2 const&>(word));
  } else {  // two instructions, where the header's conversion takes three
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
  }
}

static_assert(kElementsPer16Bytes == 8);
struct Eight {
  float value[8];
};

template <class T>
__device__ inline Eight unpack_eight(uint4 const& words) {
  uint32_t const w[4] = {words.x, words.y, words.z, words.w};
  Eight e;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const v = unpack<T>(w[i]);
    e.value[2 * i] = v.x;
    e.value[2 * i + 1] = v.y;
  }
  return e;
}

// base + 16 * units in one instruction: gathers are bound by instruction issue.
__device__ inline void const* units_after(void const* base, uint32_t units) {
  void const* result;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(result) : "r"(units), "l"(base));
  return result;
}

__device__ inline uint4 load_words(void const* from) { return *static_cast<uint4 const*>(from); }

template <class T>
__device__ inline Eight load_eight(T const* from) {
  return unpack_eight<T>(load_words(from));
}

template <class T>
__device__ inline void store_eight(T* to, Eight const& e) {
  float const* v = e.value;
  *reinterpret_cast<uint4*>(to) = {pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]),
                                   pack<T>(v[6], v[7])};
}

// Stores or adds to one element, float32 or T.
template <class T>
__device__ inline void store_element(void* data, bool is_float, bool accumulate, int64_t at,
                                     float value) {
  if (is_float) {
    float* const to = static_cast<float*>(data) + at;
    *to = value + (accumulate ? *to : 0.f);
  } else {
    T* const to = static_cast<T*>(data) + at;
    *to = T(value + (accumulate ? float(*to) : 0.f));
  }
}

}  // namespace guild::cuda
