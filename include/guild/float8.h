// FP8: matrices quantised block by block, and their grouped product.
//
// A quantised matrix is codes of one byte, in the formats of the OCP 8-bit floating point
// specification as torch names them, and float32 scales: an element is its code times its block's
// scale. Rows have a scale for every 128 columns, weights for every 128 x 128 elements. Both are
// DeepSeek-V3's, arXiv:2412.19437, section 3.3.
#pragma once
#include "guild/types.h"

namespace guild {

enum class Float8 : int {
  e4m3,  // float8_e4m3fn: largest 448, no infinities
  e5m2,  // float8_e5m2: largest 57,344
};

// How a block's scale follows from its largest absolute value, with L the format's largest:
//   exact          that value / L
//   power_of_two   the smallest power of two that is not below it
enum class ScaleKind : int { exact, power_of_two };

// Elements that share a scale, along a row and, of a weight, along a column. The last block of a
// dimension may be smaller.
inline constexpr int64_t kScaleBlock = 128;

// One scale a block: element (e, i, j) at data[e * expert_stride + i * row_stride + j *
// col_stride].
template <class F>
struct BlockScales {
  F* data = nullptr;
  int64_t expert_stride = 0, row_stride = 0, col_stride = 1;
};
using Scales = BlockScales<float>;
using ConstScales = BlockScales<float const>;

// Codes and scales of a matrix (rows, columns), a scale for every 128 columns of a row: codes are
// the elements times 1 / scale, rounded to the nearest even. In a block whose largest absolute
// value is below 2^-100 it counts as 2^-100. A block that holds an infinity or a NaN gets NaN for
// its scale and its codes.
struct QuantizeRows {
  int64_t rows = 0, columns = 0;
  DType dtype = DType::bfloat16;  // of x: bfloat16, float16, float32
  Float8 format = Float8::e4m3;
  ScaleKind scale = ScaleKind::exact;
  ConstRows x;    // (rows, columns)
  Rows codes;     // (rows, columns) out
  Scales scales;  // (rows, ceil(columns / 128)) out; expert_stride is not read
};

// The same for expert weights (E, out, in), a scale for every 128 x 128 elements; the codes also
// with the two dimensions exchanged, for products that sum over `out`.
struct QuantizeWeights {
  int64_t experts = 0, out = 0, in = 0;
  DType dtype = DType::bfloat16;
  Float8 format = Float8::e4m3;
  ScaleKind scale = ScaleKind::exact;
  ConstWeight w;      // (E, out, in)
  Weight codes;       // (E, out, in) out, in contiguous
  Weight transposed;  // (E, out, in) out, `out` contiguous; null data: not wanted
  Scales scales;      // (E, ceil(out / 128), ceil(in / 128)) out
};

// D = A B^T for groups of rows: A (M, K) with 1x128 scales, B (E, N, K) with 128x128 scales. Blocks
// of 128 along K are summed one after the other, each scaled by the product of its two scales.
// offsets are END positions (E), as GroupedGemm has them; rows of no group are zeros.
struct ScaledGroupedGemm {
  int64_t m = 0, n = 0, k = 0, groups = 0;
  Float8 a_format = Float8::e4m3, b_format = Float8::e4m3;
  DType out_dtype = DType::bfloat16;  // bfloat16, float16, float32
  int32_t const* offsets = nullptr;   // (E)
  ConstRows a;                        // (M, K) codes
  ConstScales a_scales;               // (M, ceil(K / 128)); expert_stride is not read
  ConstWeight b;                      // (E, N, K) codes, K contiguous
  ConstScales b_scales;               // (E, ceil(N / 128), ceil(K / 128))
  Rows d;                             // (M, N) out
};

}  // namespace guild
