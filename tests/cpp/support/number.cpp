// Rounds and packs 16-bit floating point by its definition: sign, exponent, fraction.
#include "number.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace guild::test {

namespace {

struct Format {
  int fraction_bits, exponent_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};

Format format_of(DType dtype) { return dtype == DType::bfloat16 ? Format{7, 8} : Format{10, 5}; }

double round_16(Format f, double value) {
  if (!std::isfinite(value) || value == 0) return value;
  int exponent = std::ilogb(value);
  if (exponent < 1 - f.bias()) exponent = 1 - f.bias();  // subnormal
  double const unit = std::ldexp(1.0, exponent - f.fraction_bits);
  double const rounded = std::nearbyint(value / unit) * unit;
  double const most = std::ldexp(2 - std::ldexp(1.0, -f.fraction_bits), f.bias());
  double const infinity = std::numeric_limits<double>::infinity();
  return std::abs(rounded) > most ? std::copysign(infinity, value) : rounded;
}

uint16_t pack_16(Format f, double value) {
  uint16_t const sign = std::signbit(value) ? 0x8000 : 0;
  uint16_t const special = uint16_t(((1 << f.exponent_bits) - 1) << f.fraction_bits);
  if (std::isnan(value)) return uint16_t(special | (1 << (f.fraction_bits - 1)));
  if (std::isinf(value)) return uint16_t(sign | special);
  if (value == 0) return sign;
  int const exponent = std::ilogb(value);
  double const magnitude = std::abs(value);
  if (exponent < 1 - f.bias()) {
    return uint16_t(sign | int(std::ldexp(magnitude, f.bias() - 1 + f.fraction_bits)));
  }
  int const fraction = int(std::ldexp(magnitude, f.fraction_bits - exponent));  // with its top bit
  return uint16_t(sign | (((exponent + f.bias() - 1) << f.fraction_bits) + fraction));
}

double unpack_16(Format f, uint16_t bits) {
  int const exponent = (bits & 0x7fff) >> f.fraction_bits;
  int const fraction = bits & ((1 << f.fraction_bits) - 1);
  double magnitude;
  if (exponent == (1 << f.exponent_bits) - 1) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, 1 - f.bias() - f.fraction_bits);
  } else {
    magnitude =
        std::ldexp(fraction + (1 << f.fraction_bits), exponent - f.bias() - f.fraction_bits);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

}  // namespace

int64_t bytes_of(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

double round_to(DType dtype, double value) {
  if (dtype == DType::float64) return value;
  if (dtype == DType::float32) return float(value);
  return round_16(format_of(dtype), value);
}

void encode(DType dtype, double value, void* out) {
  if (dtype == DType::float64) {
    std::memcpy(out, &value, 8);
  } else if (dtype == DType::float32) {
    float const f = float(value);
    std::memcpy(out, &f, 4);
  } else {
    uint16_t const bits = pack_16(format_of(dtype), value);
    std::memcpy(out, &bits, 2);
  }
}

double decode(DType dtype, void const* in) {
  if (dtype == DType::float64) {
    double value;
    std::memcpy(&value, in, 8);
    return value;
  }
  if (dtype == DType::float32) {
    float value;
    std::memcpy(&value, in, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, in, 2);
  return unpack_16(format_of(dtype), bits);
}

}  // namespace guild::test
