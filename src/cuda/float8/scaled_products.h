// The grouped products of FP8 codes (guild/float8.h) as the kernels serve them: what a step fills
// in once it has checked its arguments. Numbers of columns are multiples of 16 and codes lie on
// 16-byte boundaries, as TMA requires.
#pragma once
#include "cuda/products.h"

namespace guild::cuda {

// D = A B^T + bias for groups of rows.
struct ScaledRowProduct {
  DType element =
      DType::bfloat16;             // bfloat16 or float16: of d, of bias, and of direct if not float
  Float8 a_format = Float8::e4m3;  // B is e4m3
  int64_t rows = 0, n = 0, k = 0;  // k: of one half
  int64_t halves = 1;
  Groups groups;
  ConstRows a;           // (rows, halves * k)
  ConstScales a_scales;  // (rows, halves * ceil(k / 128))
  ConstWeight b;         // (E, n, halves * k), k contiguous
  ConstScales b_scales;  // (E, ceil(n / 128), halves * ceil(k / 128))
  ConstRows bias;        // (E, n); null data: none
  Rows d;                // (rows, n); null data: results go to direct
  DirectOutput direct;
};
void scaled_row_product(ScaledRowProduct const& product, Queue const& queue);

// The steps themselves: X, W1 and W2 are e4m3, 16-bit values have the step's dtype.
void scaled_up_product(ScaledUp const& step, Queue const& queue);
void scaled_down_gradient_product(ScaledDownGradient const& step, Queue const& queue);
// For H in codes, and only for the activation that most models use.
void scaled_down_gradient_of_codes(ScaledDownGradient const& step, Queue const& queue);

}  // namespace guild::cuda
