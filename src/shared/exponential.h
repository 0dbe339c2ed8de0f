// exp for the CPU backend: branch-free, so that compilers vectorise it. They do not vectorise the C
// library's expf.
#pragma once
#include <bit>
#include <cstdint>
#include <limits>

namespace guild {

// exp(x) within 2 units in the last place; 0 below exp(-86.9), NaN for NaN.
// x = n ln 2 + r; exp(r) by a polynomial (Cephes expf), 2^n by its bits.
constexpr float vector_exp(float x) {
  float const clamped = x > 89.f ? 89.f : (x < -89.f ? -89.f : x);
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
  // In two factors, 2^(n - 1) and 2: n may be 128, and 2^128 is no float.
  uint32_t const exponent = (std::bit_cast<uint32_t>(shifted) + 126u) << 23;
  float const result = p * std::bit_cast<float>(exponent) * 2.f;
  return x > 88.7228394f ? std::numeric_limits<float>::infinity() : (x < -86.9f ? 0.f : result);
}

}  // namespace guild
