// Quantisation by blocks, and the grouped product of quantised operands.
#include <cmath>

#include "check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/float8.h"

namespace guild::cpu {

namespace {

template <class F>
F* scale_at(BlockScales<F> const& s, int64_t expert, int64_t i, int64_t j) {
  return s.data + expert * s.expert_stride + i * s.row_stride + j * s.col_stride;
}

// The largest absolute value; NaN and infinity count above all others.
float largest_of(float const* x, int64_t count, float largest) {
  for (int64_t i = 0; i < count && !std::isnan(largest); ++i) {
    float const size = std::abs(x[i]);
    if (!(size <= largest)) largest = size;
  }
  return largest;
}

template <class T>
void quantize_row(QuantizeRows const& x, int64_t r) {
  auto const from = rows_of<T>(x.x, x.columns).row(r);
  uint8_t* const codes = rows_of<uint8_t>(x.codes, x.columns).row(r);
  for (Span const& block : spans(x.columns, kScaleBlock)) {
    float value[kScaleBlock];
    load(from + block.first, 1, value, block.count);
    auto const scale = block_scale(largest_of(value, block.count, 0), x.format, x.scale);
    *scale_at(x.scales, 0, r, block.first / kScaleBlock) = scale.to_value;
    for (int64_t i = 0; i < block.count; ++i) {
      codes[block.first + i] = encode_float8(value[i] * scale.to_code, x.format);
    }
  }
}

template <class T>
void quantize_block(QuantizeWeights const& x, int64_t expert, Span out, Span in) {
  View<T> const w = matrix_of<T>(x.w, expert).from(out.first, in.first);
  float value[kScaleBlock];
  float largest = 0;
  for (int64_t o = 0; o < out.count; ++o) {
    load(w.at(o, 0), w.col_stride, value, in.count);
    largest = largest_of(value, in.count, largest);
  }
  auto const scale = block_scale(largest, x.format, x.scale);
  *scale_at(x.scales, expert, out.first / kScaleBlock, in.first / kScaleBlock) = scale.to_value;
  for (int64_t o = 0; o < out.count; ++o) {
    load(w.at(o, 0), w.col_stride, value, in.count);
    for (int64_t i = 0; i < in.count; ++i) {
      uint8_t const code = encode_float8(value[i] * scale.to_code, x.format);
      for (Weight const* to : {&x.codes, &x.transposed}) {
        if (to->data == nullptr) continue;
        static_cast<uint8_t*>(
            to->data)[expert * to->expert_stride + (out.first + o) * to->out_stride +
                      (in.first + i) * to->in_stride] = code;
      }
    }
  }
}

// The values of codes, without their scales.
void decode(uint8_t const* codes, int64_t stride, Float8 format, int64_t rows, int64_t columns,
            float* to) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      to[i * columns + j] = decode_float8(codes[i * stride + j], format);
    }
  }
}

template <class D>
void product_block(ScaledGroupedGemm const& x, int64_t expert, Span rows, Span cols) {
  Scratch scratch;
  float* const sum = scratch.take<float>(rows.count * cols.count);
  float* const part = scratch.take<float>(rows.count * cols.count);
  float* const a = scratch.take<float>(rows.count * kScaleBlock);
  float* const b = scratch.take<float>(cols.count * kScaleBlock);
  std::fill_n(sum, rows.count * cols.count, 0.f);
  int64_t const a_stride = rows_of<uint8_t>(x.a, x.k).stride;
  auto const* const a_codes = rows_of<uint8_t>(x.a, x.k).row(rows.first);
  View<uint8_t> const b_codes = matrix_of<uint8_t>(x.b, expert).from(cols.first, 0);
  for (Span const& inner : spans(x.k, kScaleBlock)) {
    decode(a_codes + inner.first, a_stride, x.a_format, rows.count, inner.count, a);
    decode(b_codes.at(0, inner.first), b_codes.row_stride, x.b_format, cols.count, inner.count, b);
    multiply(View<float>{a, inner.count, 1}, View<float>{b, 1, inner.count}, part, rows.count,
             cols.count, inner.count);
    int64_t const k = inner.first / kScaleBlock;
    for (int64_t i = 0; i < rows.count; ++i) {
      float const row_scale = *scale_at(x.a_scales, 0, rows.first + i, k);
      for (int64_t j = 0; j < cols.count; ++j) {
        float const scale =
            row_scale * *scale_at(x.b_scales, expert, (cols.first + j) / kScaleBlock, k);
        sum[i * cols.count + j] += part[i * cols.count + j] * scale;
      }
    }
  }
  D* const out = static_cast<D*>(x.d.data);
  store_block(sum, rows, cols, out, x.d.stride == 0 ? x.n : x.d.stride, 1, false, scratch);
}

// Calls body.template operator()<T>() with the element type, which is not float64.
template <class Body>
void with_narrow_element(DType dtype, Body&& body) {
  dtype == DType::bfloat16  ? body.template operator()<bf16>()
  : dtype == DType::float16 ? body.template operator()<fp16>()
                            : body.template operator()<float>();
}

}  // namespace

void quantize_rows(QuantizeRows const& x) {
  require_processor();
  check(x);
  with_narrow_element(x.dtype, [&]<class T> {
    parallel(x.rows, double(x.rows * x.columns), [&](int64_t r) { quantize_row<T>(x, r); });
  });
}

void quantize_weights(QuantizeWeights const& x) {
  require_processor();
  check(x);
  auto const out = spans(x.out, kScaleBlock), in = spans(x.in, kScaleBlock);
  int64_t const down = int64_t(out.size()), across = int64_t(in.size());
  with_narrow_element(x.dtype, [&]<class T> {
    parallel(x.experts * down * across, double(x.experts * x.out * x.in), [&](int64_t i) {
      quantize_block<T>(x, i / (down * across), out[i / across % down], in[i % across]);
    });
  });
}

void scaled_grouped_gemm(ScaledGroupedGemm const& x) {
  require_processor();
  check(x);
  Groups const groups{x.offsets, int(x.groups), int(x.m)};
  with_narrow_element(x.out_dtype, [&]<class D> {
    parallel_pairs(row_blocks(groups), spans(x.n, kBlockColumns), double(x.m * x.n) * double(x.k),
                   [&](Block const& block, Span cols) {
                     product_block<D>(x, block.expert, block.rows, cols);
                   });
    auto const all = group_rows(groups);
    D* const d = static_cast<D*>(x.d.data);
    int64_t const stride = x.d.stride == 0 ? x.n : x.d.stride;
    for (int64_t r = all.back().rows.first + all.back().rows.count; r < x.m; ++r) {
      std::fill_n(d + r * stride, x.n, D{});
    }
  });
}

}  // namespace guild::cpu
