// With g = dO[row_token] W2 of quantised dO and W2: dH = d activation(s * g, H), quantised, and
// A' = s * A and the score parts <g, A>
#include <vector>

#include "checks/check.h"
#include "cpu/activate.h"
#include "cpu/float8/scaled_sums.h"
#include "guild/cpu.h"
#include "guild/float8_chunks.h"
#include "processor.h"
#include "shared/gemm_config.h"

namespace guild::cpu {

namespace {

static_assert(kBlockColumns % kScoreColumns == 0 && kScoreColumns % kScaleBlock == 0);

int64_t width_of(ScaledDownGradient const& x) {
  return x.sizes.intermediate * (x.activation.gated ? 2 : 1);
}

Half half_of(ScaledDownGradient const& x, int half) {
  return half == 0 ? gate_half(x.order, x.activation.gated)
                   : up_half(x.order, x.sizes.intermediate);
}

int64_t first_block(ScaledDownGradient const& x, int half, Span cols) {
  return half * scale_blocks(x.sizes.intermediate) + cols.first / kScaleBlock;
}

// One half of a row of H, in the form in which it was kept.
template <class T>
void load_half(ScaledDownGradient const& x, int half, int64_t row, Span cols, float* to) {
  if (x.h.data != nullptr) {
    Half const at = half_of(x, half);
    T const* const h = rows_of<T>(x.h, width_of(x)).row(row);
    load(h + at.first + cols.first * at.stride, at.stride, to, cols.count);
    return;
  }
  auto const& value = values_of(x.h_format);
  uint8_t const* const codes =
      rows_of<uint8_t>(x.h_codes, width_of(x)).row(row) + half * x.sizes.intermediate + cols.first;
  for (int64_t j = 0; j < cols.count; ++j) {
    int64_t const block = first_block(x, half, cols) + j / kScaleBlock;
    to[j] = value[codes[j]] * *scale_at(x.h_scales, 0, row, block);
  }
}

template <class T>
void store_half(ScaledDownGradient const& x, int half, int64_t row, Span cols, float const* from) {
  uint8_t* const codes = rows_of<uint8_t>(x.dh_codes, width_of(x)).row(row);
  quantize_span(from, cols.count, x.format, x.scale,
                codes + half * x.sizes.intermediate + cols.first,
                scale_at(x.dh_scales, 0, row, first_block(x, half, cols)), x.dh_scales.col_stride);
  if (x.dh.data == nullptr) return;
  Half const at = half_of(x, half);
  T* const dh = rows_of<T>(x.dh, width_of(x)).row(row);
  store(from, dh + at.first + cols.first * at.stride, at.stride, cols.count);
}

// One row from its g on: gradients, A' and partial sums for the block's columns.
template <class T>
void finish_row(ScaledDownGradient const& x, int64_t row, Span cols, float const* g,
                float* scratch) {
  bool const gated = x.activation.gated;
  float *const gate = scratch, *const up = gate + cols.count, *const a = up + cols.count;
  load_half<T>(x, 0, row, cols, gate);
  if (gated) load_half<T>(x, 1, row, cols, up);
  auto const* const scores = static_cast<float const*>(x.routing.row_score);
  float const score = scores == nullptr ? 1 : scores[row];
  auto* const parts = static_cast<float*>(x.score_parts);
  for (int64_t j = 0; j < cols.count; j += kScoreColumns) {
    int64_t const count = std::min<int64_t>(kScoreColumns, cols.count - j);
    float const part =
        activate_row_gradient(x.activation, score, g + j, gate + j, up + j, a + j, count);
    if (parts != nullptr) {
      parts[row * score_parts(x.sizes) + (cols.first + j) / kScoreColumns] = part;
    }
  }
  store_half<T>(x, 0, row, cols, gate);
  if (gated) store_half<T>(x, 1, row, cols, up);
  if (x.a_scaled.data != nullptr) {
    store(a, rows_of<T>(x.a_scaled, x.sizes.intermediate).row(row) + cols.first, 1, cols.count);
  }
}

template <class T>
void gradient_block(ScaledDownGradient const& x, Block const& block, Span cols) {
  Scratch scratch;
  Sizes const& s = x.sizes;
  int64_t const count = block.rows.count;
  float* const g = scratch.take<float>(count * cols.count);
  std::fill_n(g, count * cols.count, 0.f);
  auto const in = rows_of<uint8_t>(x.dout, s.hidden);
  ScaledRows const rows{in.data,       in.stride,           x.dout_scales,
                        x.dout_format, x.routing.row_token, s.tokens};
  ScaledMatrix w = scaled_matrix(x.w_down, x.w_scales, block.expert, x.w_format);
  w.codes = w.codes.transposed();  // W2^T, (I, H), whose products run over H
  std::swap(w.scales.row_stride, w.scales.col_stride);
  add_scaled_sums(rows, w, block.rows, cols, s.hidden, g, scratch);
  float* const row_scratch = scratch.take<float>(3 * cols.count);
  for (int64_t i = 0; i < count; ++i) {
    finish_row<T>(x, block.rows.first + i, cols, g + i * cols.count, row_scratch);
  }
}

// dH's chunks from its codes, those of A' from its values.
void store_chunks(ScaledDownGradient const& x) {
  if (x.sizes.rows() == 0) return;
  QuantizeChunks chunks;
  chunks.rows = x.sizes.rows();
  chunks.groups = x.sizes.experts;
  chunks.columns = x.sizes.intermediate;
  chunks.offsets = x.routing.offsets;
  if (x.dh_chunks.codes != nullptr) {
    chunks.halves = x.activation.gated ? 2 : 1;
    chunks.format = x.format;
    chunks.x = x.dh_codes;
    chunks.x_scales = {x.dh_scales.data, x.dh_scales.expert_stride, x.dh_scales.row_stride,
                       x.dh_scales.col_stride};
    chunks.codes = x.dh_chunks.codes;
    chunks.scales = x.dh_chunks.scales;
    quantize_chunks(chunks);
  }
  if (x.a_chunks.codes != nullptr) {
    chunks.halves = 1;
    chunks.format = Float8::e4m3;
    chunks.dtype = x.dtype;
    chunks.x = x.a_scaled;
    chunks.x_scales = {};
    chunks.codes = x.a_chunks.codes;
    chunks.scales = x.a_chunks.scales;
    quantize_chunks(chunks);
  }
}

}  // namespace

void scaled_down_gradient(ScaledDownGradient const& x) {
  require_processor();
  check(x);
  auto const blocks = row_blocks(expert_groups(x.routing.offsets, x.sizes.experts, x.sizes.rows()));
  with_narrow_element(x.dtype, [&]<class T> {
    ScaledDownGradient made = x;
    std::vector<T> a_scaled;
    if (x.a_chunks.codes != nullptr && x.a_scaled.data == nullptr) {
      a_scaled.resize(x.sizes.rows() * x.sizes.intermediate);
      made.a_scaled = {a_scaled.data()};
    }
    parallel_pairs(blocks, spans(x.sizes.intermediate, kBlockColumns), product_work(x.sizes),
                   [&](Block const& block, Span cols) { gradient_block<T>(made, block, cols); });
    store_chunks(made);
  });
}

}  // namespace guild::cpu
