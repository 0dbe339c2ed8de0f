// The arithmetic of FP8 blocks: scales, encoding and decoding. Tested on the CPU; kernels encode
// with the hardware's conversion, which rounds in the same way.
#pragma once
#include <bit>
#include <cstdint>
#include <limits>

#include "guild/float8.h"
#include "shared/ceil_div.h"
#include "shared/host_device.h"

namespace guild {

// How many blocks, with one scale each, a dimension of this many elements has.
inline int64_t scale_blocks(int64_t elements) { return ceil_div(elements, kScaleBlock); }

GUILD_HD float largest_of(Float8 format) { return format == Float8::e4m3 ? 448.f : 57344.f; }

// False for NaN.
GUILD_HD bool below_infinity(float x) { return x <= std::numeric_limits<float>::max(); }

// The exponent of a power-of-two scale: that of `largest` minus that of the format's largest value;
// with round_up plus 1 if `largest` / scale would otherwise exceed that value.
GUILD_HD int scale_exponent(float largest, Float8 format, bool round_up) {
  // Both formats' largest value is 1.75 times a power of two.
  uint32_t const bits = std::bit_cast<uint32_t>(largest);
  bool const above = (bits & 0x7fffff) > 0x600000;
  int const log2_limit = format == Float8::e4m3 ? 8 : 15;
  return int(bits >> 23) - 127 - log2_limit + (above && round_up ? 1 : 0);
}

// code = element * to_code; element = code * to_value.
struct BlockScale {
  float to_code, to_value;
};

inline constexpr float kLeastLargest = 0x1p-100f;

// largest: the block's largest absolute value, NaN or infinity if one of its elements is that.
GUILD_HD BlockScale block_scale(float largest, Float8 format, ScaleKind kind) {
  float const limit = largest_of(format);
  if (!below_infinity(largest)) {
    float const nan = std::numeric_limits<float>::quiet_NaN();
    return {nan, nan};
  }
  if (largest < kLeastLargest) largest = kLeastLargest;
  if (kind == ScaleKind::exact) return {limit / largest, largest / limit};
  int const exponent = scale_exponent(largest, format, /*round_up=*/true);
  return {std::bit_cast<float>(uint32_t(127 - exponent) << 23),
          std::bit_cast<float>(uint32_t(127 + exponent) << 23)};
}

// Mantissa bits, exponent bias, and the code of the largest value.
struct Float8Format {
  int mantissa, bias;
  uint8_t largest, nan;
};
GUILD_HD Float8Format format_of(Float8 format) {
  return format == Float8::e4m3 ? Float8Format{3, 7, 0x7e, 0x7f} : Float8Format{2, 15, 0x7b, 0x7f};
}

inline constexpr uint8_t kE5M2Infinity = 0x7c;

// Rounds to nearest even and saturates to the largest value.
GUILD_HD uint8_t encode_float8(float x, Float8 format) {
  Float8Format const f = format_of(format);
  uint32_t const bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  uint8_t const sign = uint8_t(bits >> 24 & 0x80);
  if (magnitude > 0x7f800000) return f.nan;                  // the hardware drops a NaN's sign
  int const exponent = int(magnitude >> 23) - 127 + f.bias;  // in the format, if it is normal
  int const drop = 23 - f.mantissa + (exponent < 1 ? 1 - exponent : 0);
  if (drop > 24) return sign;
  uint32_t const significand = (magnitude & 0x7fffff) | 0x800000;
  uint32_t const half = 1u << (drop - 1), odd = significand >> drop & 1;
  uint32_t code = (significand + half - 1 + odd) >> drop;
  if (exponent >= 1) code += uint32_t(exponent - 1) << f.mantissa;
  return uint8_t(sign | (code < f.largest ? code : f.largest));
}

// Encodes a code's value times a ratio of scales. Unlike encode_float8, preserves e5m2's infinity.
GUILD_HD uint8_t encode_rescaled(float x, Float8 format) {
  uint32_t const bits = std::bit_cast<uint32_t>(x);
  bool const infinite = (bits & 0x7fffffff) == 0x7f800000;
  if (infinite && format == Float8::e5m2) return uint8_t((bits >> 24 & 0x80) | kE5M2Infinity);
  return encode_float8(x, format);
}

GUILD_HD float decode_float8(uint8_t code, Float8 format) {
  Float8Format const f = format_of(format);
  int const magnitude = code & 0x7f, exponent = magnitude >> f.mantissa;
  int const fraction = magnitude & ((1 << f.mantissa) - 1);
  float const sign = code & 0x80 ? -1.f : 1.f;
  if (format == Float8::e4m3 ? magnitude == 0x7f : magnitude > kE5M2Infinity) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  if (magnitude == kE5M2Infinity && format == Float8::e5m2) {
    return sign * std::numeric_limits<float>::infinity();
  }
  int const significand = exponent == 0 ? fraction : fraction | 1 << f.mantissa;
  int const power = (exponent == 0 ? 1 : exponent) - f.bias - f.mantissa;
  return sign * float(significand) * std::bit_cast<float>(uint32_t(127 + power) << 23);
}

}  // namespace guild
