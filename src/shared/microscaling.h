// The arithmetic of microscaling blocks, the same on both backends.
#pragma once
#include <cmath>

#include "guild/microscaling.h"
#include "shared/float8.h"

namespace guild {

// A block's encoded scale, and the factor from elements to codes.
struct MicroScale {
  uint8_t code;
  float to_code;
};

inline constexpr int kE8M0Bias = 127;
inline constexpr uint8_t kE8M0NaN = 0xff, kE4M3NaN = 0x7f;

GUILD_HD float power_of_two(int exponent) {  // -127 <= exponent <= 127
  return exponent > -127 ? std::bit_cast<float>(uint32_t(127 + exponent) << 23)
                         : std::bit_cast<float>(uint32_t(1) << 22);
}

// largest: the block's largest absolute value, NaN or infinity if one of its elements is that.
GUILD_HD MicroScale mx_scale(float largest, Float8 format, MicroRounding rounding) {
  if (!below_infinity(largest)) return {kE8M0NaN, std::numeric_limits<float>::quiet_NaN()};
  int const exponent = scale_exponent(largest, format, rounding == MicroRounding::ceil);
  int const clamped = exponent < -kE8M0Bias ? -kE8M0Bias : exponent;
  return {uint8_t(clamped + kE8M0Bias), power_of_two(-clamped)};
}

inline constexpr float kLargestE2M1 = 6;

// NVFP4's global scale for this largest absolute value.
GUILD_HD float nvfp4_global(float largest) {
  if (largest < kLeastLargest) largest = kLeastLargest;
  return largest / (kLargestE2M1 * 448);
}

// The factor from elements to codes for this block scale; 0, which makes all codes zeros, if the
// inverse of the product of both scales is not a positive finite number.
GUILD_HD float nvfp4_to_code(uint8_t code, float global) {
  float const inverse = 1 / (decode_float8(code, Float8::e4m3) * global);
  return inverse > 0 && below_infinity(inverse) ? inverse : 0.f;
}

GUILD_HD MicroScale nvfp4_scale(float largest, float global) {
  if (!below_infinity(largest)) return {kE4M3NaN, 0};
  if (largest == 0) return {0, 0};  // whatever the global scale
  uint8_t const code = encode_float8(largest / kLargestE2M1 / global, Float8::e4m3);
  return {code, nvfp4_to_code(code, global)};
}

// a / b, correctly rounded, without a division; inverse: 1 / b. The first step leaves a quotient
// that is off by at most one ulp, whose remainder is exact. Valid if the exponents of a, b and the
// quotient are far from the limits of float: Markstein, IBM J. Res. Dev. 34 (1990), p. 111.
GUILD_HD float rounded_quotient(float a, float b, float inverse) {
  float q = a * inverse;
  q = std::fma(std::fma(-b, q, a), inverse, q);
  return std::fma(std::fma(-b, q, a), inverse, q);
}

// largest / 6 / global, as two divisions round it; inverse: 1 / global.
GUILD_HD float nvfp4_ratio(float largest, float global, float inverse) {
  auto const is_ordinary = [](float x) { return x >= 0x1p-60f && x <= 0x1p60f; };
  if (!is_ordinary(global) || !(is_ordinary(largest) || largest == 0)) {
    return largest / kLargestE2M1 / global;
  }
  return rounded_quotient(rounded_quotient(largest, kLargestE2M1, 1 / kLargestE2M1), global,
                          inverse);
}

// The E2M1 code of |x| in the three low bits: the nearest of 0, .5, 1, 1.5, 2, 3, 4 and 6, ties to
// the even code, 6 for NaN. The bits above are arbitrary.
//
// With 2^k the largest power of two <= max(|x|, 1), values are 2^(k - 1) apart, which is the last
// bit of 2^k (2^22 + 3): adding that number to |x| rounds |x|. Codes start two higher with each k,
// which `sum >> 22`, twice the sum's exponent, adds.
GUILD_HD uint32_t e2m1_bits(float x) {
  float const clipped = std::fmin(std::fabs(x), kLargestE2M1);
  float const power =
      std::bit_cast<float>(std::bit_cast<uint32_t>(std::fmax(clipped, 1.f)) & 0x7f800000);
  uint32_t const sum = std::bit_cast<uint32_t>(std::fma(power, 0x1p22f + 3, clipped));
  return sum + (sum >> 22);
}

// The same code alone, with the sign in bit 3.
GUILD_HD uint8_t encode_e2m1(float x) {
  return uint8_t((e2m1_bits(x) & 7) | (std::bit_cast<uint32_t>(x) >> 28 & 8));
}

// The index of the scale of (row, block), with `blocks` blocks per row.
GUILD_HD int64_t scale_place(ScaleOrder order, int64_t row, int64_t block, int64_t blocks) {
  if (order == ScaleOrder::rows) return row * blocks + block;
  int64_t const tile = row / 128 * ((blocks + 3) / 4) + block / 4;
  return tile * 512 + row % 32 * 16 + row / 32 % 4 * 4 + block % 4;
}

// The factor that converts codes from E8M0 scale `scale` to scale `above` >= `scale`.
GUILD_HD float e8m0_quotient(uint8_t scale, uint8_t above) {
  if (above == kE8M0NaN) return std::numeric_limits<float>::quiet_NaN();
  int const steps = int(above) - int(scale);
  return power_of_two(steps < 126 ? -steps : -126);
}
GUILD_HD float decode_e8m0(uint8_t scale) {
  if (scale == kE8M0NaN) return std::numeric_limits<float>::quiet_NaN();
  return power_of_two(int(scale) - kE8M0Bias);
}

}  // namespace guild
