// exp for the CPU backend: branch-free, so that compilers vectorise it. They do not vectorise the C
// library's expf.
#pragma once
#include <bit>
#include <cstdint>
#include <limits>

namespace guild {

// exp(x) within 2 units in the last place, subnormal results too; NaN for NaN.
// x = n ln 2 + r; exp(r) by a polynomial (Cephes expf), 2^n by its bits.
constexpr float vector_exp(float x) {
  float const clamped = x > 89.f ? 89.f : (x < -105.f ? -105.f : x);
  float const shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  float const shifted = clamped * 1.44269504f + shift;
  float const n = shifted - shift;
  float const r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1;
  // In two factors: n is between -152 and 128, and neither 2^-152 nor 2^128 is a float.
  int32_t const whole = int32_t(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(shift));
  int32_t const half = whole >> 1;
  float const first = std::bit_cast<float>(uint32_t(half + 127) << 23);
  float const second = std::bit_cast<float>(uint32_t(whole - half + 127) << 23);
  return x > 88.7228394f ? std::numeric_limits<float>::infinity() : p * first * second;
}

}  // namespace guild
