// H = X[row_token] W1^T + b1;  A = activation(H), of quantised X and W1, and quantised itself
#include "checks/check.h"
#include "cpu/activate.h"
#include "cpu/float8/scaled_sums.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

// One half of H for a block of rows and columns.
template <class T>
float* half_sums(ScaledUp const& x, int half, Block const& block, Span cols, Scratch& scratch) {
  Sizes const& s = x.sizes;
  int64_t const count = block.rows.count;
  float* const sum = scratch.take<float>(count * cols.count);
  std::fill_n(sum, count * cols.count, 0.f);
  auto const in = rows_of<uint8_t>(x.x, s.hidden);
  ScaledRows const rows{in.data, in.stride, x.x_scales, x.x_format, x.routing.row_token, s.tokens};
  ScaledMatrix const w = half == 0
                             ? scaled_matrix(x.w_up.gate, x.w_scales.gate, block.expert, x.w_format)
                             : scaled_matrix(x.w_up.up, x.w_scales.up, block.expert, x.w_format);
  add_scaled_sums(rows, w, block.rows, cols, s.hidden, sum, scratch);
  if (x.bias.data == nullptr) return sum;
  bool const gated = x.activation.gated;
  Half const at = half == 0 ? gate_half(x.order, gated) : up_half(x.order, s.intermediate);
  T const* const bias = rows_of<T>(x.bias, s.intermediate * (gated ? 2 : 1)).row(block.expert);
  float* const b = scratch.take<float>(cols.count);
  load(bias + at.first + cols.first * at.stride, at.stride, b, cols.count);
  for (int64_t i = 0; i < count * cols.count; ++i) sum[i] += b[i % cols.count];
  return sum;
}

template <class T>
void keep_half(ScaledUp const& x, int half, int64_t row, Span cols, float const* values) {
  int64_t const intermediate = x.sizes.intermediate;
  bool const gated = x.activation.gated;
  int64_t const width = intermediate * (gated ? 2 : 1);
  if (x.h.data != nullptr) {
    Half const at = half == 0 ? gate_half(x.order, gated) : up_half(x.order, intermediate);
    T* const to = rows_of<T>(x.h, width).row(row);
    store(values, to + at.first + cols.first * at.stride, at.stride, cols.count);
  }
  if (x.h_codes.data != nullptr) {
    int64_t const block = half * scale_blocks(intermediate) + cols.first / kScaleBlock;
    uint8_t* const to = rows_of<uint8_t>(x.h_codes, width).row(row);
    quantize_span(values, cols.count, x.format, x.scale, to + half * intermediate + cols.first,
                  scale_at(x.h_scales, 0, row, block), x.h_scales.col_stride);
  }
}

template <class T>
void up_block(ScaledUp const& x, Block const& block, Span cols) {
  Scratch scratch;
  bool const gated = x.activation.gated;
  float* const gate = half_sums<T>(x, 0, block, cols, scratch);
  float* const up = gated ? half_sums<T>(x, 1, block, cols, scratch) : nullptr;
  float* const a = scratch.take<float>(cols.count);
  auto const codes = rows_of<uint8_t>(x.a, x.sizes.intermediate);
  for (int64_t i = 0; i < block.rows.count; ++i) {
    int64_t const row = block.rows.first + i, at = i * cols.count;
    keep_half<T>(x, 0, row, cols, gate + at);
    if (gated) keep_half<T>(x, 1, row, cols, up + at);
    activate_row(x.activation, gate + at, gated ? up + at : nullptr, a, cols.count);
    quantize_span(a, cols.count, x.format, x.scale, codes.row(row) + cols.first,
                  scale_at(x.a_scales, 0, row, cols.first / kScaleBlock), x.a_scales.col_stride);
  }
}

}  // namespace

void scaled_up(ScaledUp const& x) {
  require_processor();
  check(x);
  static_assert(kBlockColumns % kScaleBlock == 0);
  auto const blocks = row_blocks(expert_groups(x.routing.offsets, x.sizes.experts, x.sizes.rows()));
  with_narrow_element(x.dtype, [&]<class T> {
    parallel_pairs(blocks, spans(x.sizes.intermediate, kBlockColumns), product_work(x.sizes),
                   [&](Block const& block, Span cols) { up_block<T>(x, block, cols); });
  });
}

}  // namespace guild::cpu
