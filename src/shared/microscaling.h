// The arithmetic of microscaling blocks, the same on both backends.
#pragma once
#include "guild/microscaling.h"
#include "shared/float8.h"

namespace guild {

// A block's scale as its byte, and what elements are multiplied by to get codes.
struct MicroScale {
  uint8_t code;
  float to_code;
};

inline constexpr int kE8M0Bias = 127;
inline constexpr uint8_t kE8M0NaN = 0xff, kE4M3NaN = 0x7f;

GUILD_HD bool is_finite(float x) { return x <= std::numeric_limits<float>::max(); }

GUILD_HD float power_of_two(int exponent) {  // -127 <= exponent <= 127
  return exponent > -127 ? std::bit_cast<float>(uint32_t(127 + exponent) << 23)
                         : std::bit_cast<float>(uint32_t(1) << 22);
}

// largest: the block's largest absolute value, NaN or infinity if one of its elements is that.
GUILD_HD MicroScale mx_scale(float largest, Float8 format, MicroRounding rounding) {
  if (!is_finite(largest)) return {kE8M0NaN, std::numeric_limits<float>::quiet_NaN()};
  uint32_t const bits = std::bit_cast<uint32_t>(largest);
  // Both formats' largest value is 1.75 times a power of two.
  int const log2_limit = format == Float8::e4m3 ? 8 : 15;
  int const above = rounding == MicroRounding::ceil && (bits & 0x7fffff) > 0x600000 ? 1 : 0;
  int const exponent = int(bits >> 23) - 127 - log2_limit + above;
  int const clamped = exponent < -kE8M0Bias ? -kE8M0Bias : exponent;
  return {uint8_t(clamped + kE8M0Bias), power_of_two(-clamped)};
}

inline constexpr float kLargestE2M1 = 6;

// NVFP4's global scale for this largest absolute value.
GUILD_HD float nvfp4_global(float largest) {
  if (largest < kLeastLargest) largest = kLeastLargest;
  return largest / (kLargestE2M1 * 448);
}

// to_code: 0 where all codes are zeros.
GUILD_HD MicroScale nvfp4_scale(float largest, float global) {
  if (!is_finite(largest)) return {kE4M3NaN, 0};
  uint8_t const code = encode_float8(largest / kLargestE2M1 / global, Float8::e4m3);
  float const scale = decode_float8(code, Float8::e4m3) * global;
  return {code, scale > 0 ? 1 / scale : 0.f};
}

// The nearest of 0, .5, 1, 1.5, 2, 3, 4 and 6, ties to the even code, with the sign in bit 3. Not
// for NaN.
GUILD_HD uint8_t encode_e2m1(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  uint32_t code;
  if (magnitude < 0x3f800000) {  // below 1, in steps of .5: those of floats from 2^22 on
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p22f) & 7;
  } else {
    uint32_t const rounded = (magnitude + 0x1fffff + (magnitude >> 22 & 1)) >> 22;
    code = rounded - (127 << 1) + 2;
    if (code > 7) code = 7;
  }
  return uint8_t(code | (bits >> 28 & 8));
}

// Where the scale of (row, block) lies among `blocks` of a row.
GUILD_HD int64_t scale_place(ScaleOrder order, int64_t row, int64_t block, int64_t blocks) {
  if (order == ScaleOrder::rows) return row * blocks + block;
  int64_t const tile = row / 128 * ((blocks + 3) / 4) + block / 4;
  return tile * 512 + row % 32 * 16 + row / 32 % 4 * 4 + block % 4;
}

// What codes with an E8M0 scale are multiplied by under a scale that is not below it.
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
