// Sums of products of quantised rows and a quantised weight, in float32: blocks of 128 along K one
// after the other, each scaled by the product of its two scales.
#pragma once
#include <array>
#include <cmath>

#include "cpu/views.h"
#include "guild/float8.h"
#include "shared/float8.h"

namespace guild::cpu {

template <class F>
F* scale_at(BlockScales<F> const& s, int64_t expert, int64_t i, int64_t j) {
  return s.data + expert * s.expert_stride + i * s.row_stride + j * s.col_stride;
}

// The scales from column j on.
template <class F>
BlockScales<F> columns_from(BlockScales<F> s, int64_t j) {
  s.data += j * s.col_stride;
  return s;
}

// The values of all codes, without their scales.
inline std::array<float, 256> const& values_of(Float8 format) {
  static auto const tables = [] {
    std::array<std::array<float, 256>, 2> all;
    for (int f = 0; f < 2; ++f) {
      for (int code = 0; code < 256; ++code) all[f][code] = decode_float8(uint8_t(code), Float8(f));
    }
    return all;
  }();
  return tables[int(format)];
}

// Rows of codes that a product reads, through row_token where that is given; a token outside
// [0, tokens) stands for a row of zeros.
struct ScaledRows {
  uint8_t const* codes;
  int64_t stride;
  ConstScales scales;
  Float8 format;
  int32_t const* row_token = nullptr;
  int64_t tokens = 0;

  int64_t at(int64_t row) const {  // -1: zeros
    if (row_token == nullptr) return row;
    int64_t const token = row_token[row];
    return token >= 0 && token < tokens ? token : -1;
  }
};

// One expert's weight, (n, k) codes.
struct ScaledMatrix {
  View<uint8_t> codes;
  ConstScales scales;
  int64_t expert;
  Float8 format;
};

inline ScaledMatrix scaled_matrix(ConstWeight const& codes, ConstScales const& scales,
                                  int64_t expert, Float8 format) {
  return {matrix_of<uint8_t>(codes, expert), scales, expert, format};
}

// sum (rows x cols), packed, += A B^T over k columns of both.
inline void add_scaled_sums(ScaledRows const& a, ScaledMatrix const& b, Span rows, Span cols,
                            int64_t k, float* sum, Scratch& scratch) {
  auto const before = scratch.position();
  float* const part = scratch.take<float>(rows.count * cols.count);
  float* const a_part = scratch.take<float>(rows.count * kScaleBlock);
  float* const b_part = scratch.take<float>(cols.count * kScaleBlock);
  auto const &a_value = values_of(a.format), &b_value = values_of(b.format);
  for (Span const& inner : spans(k, kScaleBlock)) {
    for (int64_t i = 0; i < rows.count; ++i) {
      int64_t const row = a.at(rows.first + i);
      uint8_t const* const from = a.codes + row * a.stride + inner.first;
      float* const to = a_part + i * inner.count;
      for (int64_t c = 0; c < inner.count; ++c) to[c] = row < 0 ? 0 : a_value[from[c]];
    }
    for (int64_t j = 0; j < cols.count; ++j) {
      float* const to = b_part + j * inner.count;
      for (int64_t c = 0; c < inner.count; ++c) {
        to[c] = b_value[*b.codes.at(cols.first + j, inner.first + c)];
      }
    }
    multiply(View<float>{a_part, inner.count, 1}, View<float>{b_part, 1, inner.count}, part,
             rows.count, cols.count, inner.count);
    int64_t const block = inner.first / kScaleBlock;
    for (int64_t i = 0; i < rows.count; ++i) {
      int64_t const row = a.at(rows.first + i);
      float const row_scale = row < 0 ? 0 : *scale_at(a.scales, 0, row, block);
      for (int64_t j = 0; j < cols.count; ++j) {
        float const scale =
            row_scale * *scale_at(b.scales, b.expert, (cols.first + j) / kScaleBlock, block);
        sum[i * cols.count + j] += part[i * cols.count + j] * scale;
      }
    }
  }
  scratch.rewind(before);
}

// The largest absolute value of x and `largest`; NaN and infinity count above all others.
inline float largest_of(float const* x, int64_t count, float largest) {
  for (int64_t i = 0; i < count && !std::isnan(largest); ++i) {
    float const size = std::abs(x[i]);
    if (!(size <= largest)) largest = size;
  }
  return largest;
}

// Quantises `count` values of a row that begin at a block; scales are those of the row's blocks
// from there on.
inline void quantize_span(float const* x, int64_t count, Float8 format, ScaleKind kind,
                          uint8_t* codes, float* scales, int64_t scale_stride) {
  for (Span const& block : spans(count, kScaleBlock)) {
    float const* const value = x + block.first;
    auto const scale = block_scale(largest_of(value, block.count, 0), format, kind);
    scales[block.first / kScaleBlock * scale_stride] = scale.to_value;
    for (int64_t i = 0; i < block.count; ++i) {
      codes[block.first + i] = encode_float8(value[i] * scale.to_code, format);
    }
  }
}

// Calls body.template operator()<T>() with the element type, which is not float64.
template <class Body>
void with_narrow_element(DType dtype, Body&& body) {
  dtype == DType::bfloat16  ? body.template operator()<bf16>()
  : dtype == DType::float16 ? body.template operator()<fp16>()
                            : body.template operator()<float>();
}

}  // namespace guild::cpu
