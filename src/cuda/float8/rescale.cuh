// Codes multiplied by quotients of scales and rounded again.
#pragma once
#include <cuda_fp16.h>

#include "cuda/float8/tile.cuh"

namespace guild::cuda {

// A power of two, at most 1, as a pair of halves; below 2^-24 it becomes 0.
__device__ inline uint32_t half_factor(float power_of_two) {
  __half2 const both = __float2half2_rn(power_of_two);
  return reinterpret_cast<uint32_t const&>(both);
}

// Multiplies four codes by such a factor. Products in half precision are exact, or so small that
// their codes are 0 either way. In PTX, because intrinsics compile to shifts and ORs that the
// halves of a word do not need.
__device__ inline uint32_t scale_e4m3(uint32_t codes, uint32_t factor) {
  uint32_t scaled;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 first, second;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 first, low;\n"
      "cvt.rn.f16x2.e4m3x2 second, high;\n"
      "mul.rn.f16x2 first, first, %2;\n"
      "mul.rn.f16x2 second, second, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, first;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, second;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(scaled)
      : "r"(codes), "r"(factor));
  return scaled;
}

// Four codes times any quotient of at most 1: encode_rescaled() of src/shared/float8.h.
template <Float8 format>
__device__ inline uint32_t rescale_four(uint32_t codes, float quotient) {
  float4 const v = decode_four<format>(codes);
  uint32_t const scaled =
      encode_four<format>(v.x * quotient, v.y * quotient, v.z * quotient, v.w * quotient);
  if constexpr (format == Float8::e4m3) return scaled;
  uint32_t const infinite =
      quotient > 0 ? __vcmpeq4(codes & 0x7f7f7f7f, kE5M2Infinity * 0x01010101u) : 0;
  return (scaled & ~infinite) | (codes & infinite);
}

}  // namespace guild::cuda
