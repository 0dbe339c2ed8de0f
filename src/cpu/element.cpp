// Conversions between the types in memory and the type of the arithmetic, a row at a time.
#include "cpu/element.h"

#include <algorithm>
#include <bit>

#include <Eigen/Core>

namespace guild::cpu {

namespace {

float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
float to_float(fp16 x) { return float(std::bit_cast<Eigen::half>(x)); }
float to_float(float x) { return x; }
double to_float(double x) { return x; }

template <class T>
T from_float(Compute<T> x);

template <>
bf16 from_float<bf16>(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x);
  uint32_t const rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {uint16_t(x == x ? rounded : 0x7fc0)};
}
template <>
fp16 from_float<fp16>(float x) {
  return std::bit_cast<fp16>(Eigen::half(x));
}
template <>
float from_float<float>(float x) {
  return x;
}
template <>
double from_float<double>(double x) {
  return x;
}

}  // namespace

template <class T>
void load(T const* in, int64_t stride, Compute<T>* out, int64_t count) {
  if (stride != 1) {
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(in[i * stride]);
  } else if constexpr (std::is_same_v<T, Compute<T>>) {
    std::copy_n(in, count, out);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(in[i]);
  }
}

template <class T, class F>
void store(F const* in, T* out, int64_t stride, int64_t count, bool add) {
  using Sum = Compute<T>;
  if (add) {
    for (int64_t i = 0; i < count; ++i) {
      T& o = out[i * stride];
      o = from_float<T>(Sum(to_float(o) + in[i]));
    }
  } else if (stride != 1) {
    for (int64_t i = 0; i < count; ++i) out[i * stride] = from_float<T>(Sum(in[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(Sum(in[i]));
  }
}

template void load(float const*, int64_t, float*, int64_t);
template void load(double const*, int64_t, double*, int64_t);
template void load(bf16 const*, int64_t, float*, int64_t);
template void load(fp16 const*, int64_t, float*, int64_t);
template void store(float const*, float*, int64_t, int64_t, bool);
template void store(float const*, bf16*, int64_t, int64_t, bool);
template void store(float const*, fp16*, int64_t, int64_t, bool);
template void store(double const*, double*, int64_t, int64_t, bool);
template void store(double const*, float*, int64_t, int64_t, bool);

}  // namespace guild::cpu
