// Loads and stores of eight 16-bit elements, for the memory-bound kernels, and of single results.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/sm90/launch.cuh"
#include "cuda/warp.cuh"

namespace guild::cuda {

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
