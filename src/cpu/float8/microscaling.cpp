// Quantisation to microscaling formats.
#include "shared/microscaling.h"

#include "checks/microscaling.h"
#include "cpu/float8/scaled_sums.h"
#include "processor.h"

namespace guild::cpu {

namespace {

template <class T>
void quantize_row(QuantizeMicro const& x, int64_t r) {
  bool const narrow = x.format == Microscaling::nvfp4;
  auto const format = x.format == Microscaling::mxfp8_e5m2 ? Float8::e5m2 : Float8::e4m3;
  int64_t const block = micro_block(x.format), blocks = ceil_div(x.columns, block);
  auto const from = rows_of<T>(x.x, x.columns).row(r);
  uint8_t* const to = rows_of<uint8_t>(x.codes, narrow ? x.columns / 2 : x.columns).row(r);
  for (Span const& span : spans(x.columns, block)) {
    float value[32];
    load(from + span.first, 1, value, span.count);
    float const largest = largest_of(value, span.count, 0);
    MicroScale const scale =
        narrow ? nvfp4_scale(largest, *x.global) : mx_scale(largest, format, x.rounding);
    x.scales[scale_place(x.order, r, span.first / block, blocks)] = scale.code;
    for (int64_t i = 0; i < span.count; ++i) {
      if (!narrow) {
        to[span.first + i] = encode_float8(value[i] * scale.to_code, format);
        continue;
      }
      uint8_t const code = scale.to_code == 0 ? 0 : encode_e2m1(value[i] * scale.to_code);
      uint8_t& both = to[(span.first + i) / 2];
      both = i % 2 == 0 ? code : uint8_t(both | code << 4);
    }
  }
}

// The largest absolute value of the blocks of a row that are finite.
template <class T>
float largest_finite(QuantizeMicro const& x, int64_t r) {
  auto const from = rows_of<T>(x.x, x.columns).row(r);
  float all = 0;
  for (Span const& span : spans(x.columns, micro_block(x.format))) {
    float value[32];
    load(from + span.first, 1, value, span.count);
    float const largest = largest_of(value, span.count, 0);
    if (below_infinity(largest)) all = std::max(all, largest);
  }
  return all;
}

void regroup_row(RegroupMicro const& x, int64_t r) {
  constexpr int64_t narrow = 32, of_wide = kScaleBlock / narrow;
  auto const from = rows_of<uint8_t>(x.x, x.columns).row(r);
  uint8_t* const to = rows_of<uint8_t>(x.codes, x.columns).row(r);
  int64_t const blocks = ceil_div(x.columns, narrow);
  uint8_t const* const scales = x.x_scales + r * blocks;
  auto const& value_of = values_of(x.format);
  for (Span const& wide : spans(blocks, of_wide)) {
    uint8_t const largest =
        *std::max_element(scales + wide.first, scales + wide.first + wide.count);
    *scale_at(x.scales, 0, r, wide.first / of_wide) = decode_e8m0(largest);
    for (int64_t b = wide.first; b < wide.first + wide.count; ++b) {
      float const quotient = e8m0_quotient(scales[b], largest);
      for (int64_t i = b * narrow; i < std::min((b + 1) * narrow, x.columns); ++i) {
        to[i] = encode_rescaled(value_of[from[i]] * quotient, x.format);
      }
    }
  }
}

}  // namespace

void quantize_micro(QuantizeMicro const& x) {
  require_processor();
  check(x);
  if (x.rows == 0) return;
  double const work = double(x.rows * x.columns);
  if (x.order == ScaleOrder::swizzled) {  // the rest of the last tiles
    std::fill_n(x.scales, micro_scale_bytes(x.rows, x.columns, x.format, x.order), uint8_t(0));
  }
  with_narrow_element(x.dtype, [&]<class T> {
    if (x.format == Microscaling::nvfp4 && !x.global_given) {
      std::vector<float> largest(x.rows);
      parallel(x.rows, work, [&](int64_t r) { largest[r] = largest_finite<T>(x, r); });
      *x.global = nvfp4_global(*std::max_element(largest.begin(), largest.end()));
    }
    parallel(x.rows, work, [&](int64_t r) { quantize_row<T>(x, r); });
  });
}

void regroup_micro(RegroupMicro const& x) {
  require_processor();
  check(x);
  parallel(x.rows, double(x.rows * x.columns), [&](int64_t r) { regroup_row(x, r); });
}

}  // namespace guild::cpu
