// Quantisation by blocks.
#include "checks/check.h"
#include "cpu/float8/scaled_sums.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

template <class T>
void quantize_row(QuantizeRows const& x, int64_t r) {
  auto const from = rows_of<T>(x.x, x.columns).row(r);
  uint8_t* const codes = rows_of<uint8_t>(x.codes, x.columns).row(r);
  for (Span const& block : spans(x.columns, kScaleBlock)) {
    float value[kScaleBlock];
    load(from + block.first, 1, value, block.count);
    quantize_span(value, block.count, x.format, x.scale, codes + block.first,
                  scale_at(x.scales, 0, r, block.first / kScaleBlock), 1);
  }
}

// The block of one half at `out`; its rows of codes begin at row `first`, its scales at row
// `block`.
template <class T>
void quantize_block(QuantizeWeights const& x, ConstWeight const& half, int64_t expert, Span out,
                    Span in, int64_t first, int64_t block) {
  View<T> const w = matrix_of<T>(half, expert).from(out.first, in.first);
  float value[kScaleBlock];
  float largest = 0;
  for (int64_t o = 0; o < out.count; ++o) {
    load(w.at(o, 0), w.col_stride, value, in.count);
    largest = largest_of(value, in.count, largest);
  }
  auto const scale = block_scale(largest, x.format, x.scale);
  *scale_at(x.scales, expert, block + out.first / kScaleBlock, in.first / kScaleBlock) =
      scale.to_value;
  for (int64_t o = 0; o < out.count; ++o) {
    load(w.at(o, 0), w.col_stride, value, in.count);
    for (int64_t i = 0; i < in.count; ++i) {
      uint8_t const code = encode_float8(value[i] * scale.to_code, x.format);
      for (Weight const* to : {&x.codes, &x.transposed}) {
        if (to->data == nullptr) continue;
        static_cast<uint8_t*>(
            to->data)[expert * to->expert_stride + (first + out.first + o) * to->out_stride +
                      (in.first + i) * to->in_stride] = code;
      }
    }
  }
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
  int64_t const down = int64_t(out.size()), across = int64_t(in.size()), of_half = down * across;
  int64_t const halves = x.halves();
  with_narrow_element(x.dtype, [&]<class T> {
    parallel(x.experts * halves * of_half, double(x.experts * halves * x.out * x.in),
             [&](int64_t i) {
               bool const second = i / of_half % halves == 1;
               quantize_block<T>(x, second ? x.w.up : x.w.gate, i / of_half / halves,
                                 out[i / across % down], in[i % across], second ? x.out : 0,
                                 second ? down : 0);
             });
  });
}

}  // namespace guild::cpu
