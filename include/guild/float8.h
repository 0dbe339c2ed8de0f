// FP8: matrices quantised block by block, and their grouped product.
//
// A quantised matrix consists of one-byte codes, in the formats of the OCP 8-bit floating point
// specification as torch names them, and float32 scales: an element is its code times its block's
// scale. Rows have a scale for every 128 columns, weights for every 128 x 128 elements. Both
// choices are DeepSeek-V3's, arXiv:2412.19437, section 3.3.
#pragma once
#include "guild/steps.h"

namespace guild {

enum class Float8 : int {
  e4m3,  // float8_e4m3fn: largest 448, no infinities
  e5m2,  // float8_e5m2: largest 57,344
};

// A block's scale, with amax the block's largest absolute value and L the format's largest value:
//   exact          amax / L
//   power_of_two   the smallest power of two >= amax / L
enum class ScaleKind : int { exact, power_of_two };

// Elements that share a scale along a row and, in a weight, along a column too. The last block of a
// dimension may be smaller.
inline constexpr int64_t kScaleBlock = 128;

// One scale per block: scale (e, i, j) is at data[e * expert_stride + i * row_stride + j *
// col_stride].
template <class F>
struct BlockScales {
  F* data = nullptr;
  int64_t expert_stride = 0, row_stride = 0, col_stride = 1;
};
using Scales = BlockScales<float>;
using ConstScales = BlockScales<float const>;

// Quantises a matrix (rows, columns), with a scale for every 128 columns of a row. Codes are the
// elements times 1 / scale, rounded to nearest even. An amax below 2^-100 counts as 2^-100. The
// scale and the codes of a block with an infinity or a NaN are NaN.
struct QuantizeRows {
  int64_t rows = 0, columns = 0;
  DType dtype = DType::bfloat16;  // of x: bfloat16, float16, float32
  Float8 format = Float8::e4m3;
  ScaleKind scale = ScaleKind::exact;
  ConstRows x = {};    // (rows, columns)
  Rows codes = {};     // (rows, columns) out
  Scales scales = {};  // (rows, ceil(columns / 128)) out; expert_stride is not read
};

// The same for expert weights (E, out, in), with a scale for every 128 x 128 elements; optionally
// also writes the codes transposed, for products that sum over `out`. The two halves of a gated
// weight are quantised separately, so no block spans both: `out` is the size of one half, and in
// codes and scales the gate's rows precede up's, whatever the layout of w.
struct QuantizeWeights {
  int64_t experts = 0, out = 0, in = 0;
  DType dtype = DType::bfloat16;
  Float8 format = Float8::e4m3;
  ScaleKind scale = ScaleKind::exact;
  ConstUpWeight w = {};    // (E, out, in); up with null data: one half
  Weight codes = {};       // (E, halves * out, in) out, `in` contiguous
  Weight transposed = {};  // (E, halves * out, in) out, `out` contiguous; null data: not wanted
  Scales scales = {};      // (E, halves * ceil(out / 128), ceil(in / 128)) out

  int64_t halves() const { return w.up.data == nullptr ? 1 : 2; }
};

// D = A B^T + bias for groups of rows: A (M, K) with 1x128 scales, B (E, N, K) with 128x128 scales.
// Blocks of 128 along K are accumulated in order, each scaled by the product of its two scales.
// offsets are END positions (E), as in GroupedGemm. Rows outside all groups are set to zero,
// without the bias.
//
// halves = 2: A is (M, 2K) and B (E, N, 2K), and each half of K has its own blocks, the last of
// which may be smaller. Scales are (M, 2 ceil(K / 128)) and (E, ceil(N / 128), 2 ceil(K / 128)),
// the first half's blocks before the second's. The gradient of the up projection's input is such
// a product, of dH and W1, whose gate and up parts are quantised separately.
struct ScaledGroupedGemm {
  int64_t m = 0, n = 0, k = 0, groups = 0;  // k: of one half
  int64_t halves = 1;                       // 1 or 2
  Float8 a_format = Float8::e4m3, b_format = Float8::e4m3;
  DType out_dtype = DType::bfloat16;  // of d and bias: bfloat16, float16, float32
  int32_t const* offsets = nullptr;   // (E)
  ConstRows a = {};                   // (M, K) codes
  ConstScales a_scales = {};          // (M, ceil(K / 128)); expert_stride is not read
  ConstWeight b = {};                 // (E, N, K) codes, K contiguous
  ConstScales b_scales = {};          // (E, ceil(N / 128), ceil(K / 128))
  Rows d = {};                        // (M, N) out
  ConstRows bias = {};                // (E, N); null data: none
};

// Symbols below are those of steps.h. "In halves" means that the gate's I columns precede up's,
// whatever `order` is, and that each half has its own blocks: scales are (R, 2 ceil(I / 128)).
// Without a gate there is one half. Quantised H and dH are stored in halves.

// H = X[row_token] W1^T + b1;  A = activation(H). A is quantised from its float32 values as by
// QuantizeRows. H is written only if h (rounded to dtype) or h_codes (quantised) is given.
struct ScaledUp {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;  // of bias and h: bfloat16, float16, float32
  Activation activation = {};
  GateUp order = GateUp::concatenated;  // of h and bias
  Routing routing = {};                 // uses offsets, row_token
  Float8 x_format = Float8::e4m3, w_format = Float8::e4m3;
  Float8 format = Float8::e4m3;  // of a and h_codes
  ScaleKind scale = ScaleKind::exact;
  ConstRows x = {};                        // (T, H) codes, or (R, H) where row_token is null
  ConstScales x_scales = {};               // (T or R, ceil(H / 128)); expert_stride is not read
  ConstUpWeight w_up = {};                 // (E, I, H) codes twice, H contiguous
  GatedWeight<ConstScales> w_scales = {};  // (E, ceil(I / 128), ceil(H / 128)) twice
  ConstRows bias = {};                     // (E, W); null data: none
  Rows h = {};                             // (R, W) out; null data: not kept
  Rows h_codes = {};                       // (R, W) out, in halves; null data: not kept
  Scales h_scales = {};                    // (R, halves * ceil(I / 128)) out, where h_codes are
  Rows a = {};                             // (R, I) codes, out
  Scales a_scales = {};                    // (R, ceil(I / 128)) out
};

// Chunks of all rows, as QuantizeChunks (guild/float8_chunks.h) writes them.
struct Chunks {
  uint8_t* codes = nullptr;  // (slots, columns, 128); null: not wanted
  Scales scales = {};        // (slots, halves * ceil(columns of a half / 128))
};

// With g = dO[row_token] W2 (not scaled), s = row_score and A recomputed from H:
//
//   dH = d activation(s * g, H), quantised;   score_parts = partial sums of <g, A> over I
//
// and the operands of the weight gradients, dH and A' = s * A: in dtype, as chunks, or both.
// dh_chunks equal QuantizeChunks of dh_codes bit for bit. a_chunks equal QuantizeChunks of A',
// rounded to dtype, with power-of-two scales, whatever `scale` is.
struct ScaledDownGradient {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;  // of h, dh and a_scaled: bfloat16, float16, float32
  Activation activation = {};
  GateUp order = GateUp::concatenated;  // of h and dh
  Routing routing = {};                 // uses offsets, row_token, row_score
  Float8 dout_format = Float8::e4m3, w_format = Float8::e4m3, h_format = Float8::e4m3;
  Float8 format = Float8::e4m3;  // of dh_codes
  ScaleKind scale = ScaleKind::exact;
  ConstRows dout = {};           // (T, H) codes, or (R, H) where row_token is null
  ConstScales dout_scales = {};  // (T or R, ceil(H / 128)); expert_stride is not read
  ConstWeight w_down = {};       // (E, H, I) codes, H contiguous
  ConstScales w_scales = {};     // (E, ceil(H / 128), ceil(I / 128))
  ConstRows h = {};              // (R, W); null data: h_codes
  ConstRows h_codes = {};        // (R, W) in halves; read where h is null
  ConstScales h_scales = {};     // (R, halves * ceil(I / 128))
  Rows dh_codes = {};            // (R, W) out, in halves
  Scales dh_scales = {};         // (R, halves * ceil(I / 128)) out
  Rows dh = {};                  // (R, W) out; null data: not wanted
  Rows a_scaled = {};            // (R, I) out; null data: not wanted
  Chunks dh_chunks = {};         // columns W, in halves; only with powers of two
  Chunks a_chunks = {};          // columns I, e4m3
  void* score_parts = nullptr;   // float32 (R, score_parts(sizes)) out; null: no dS
};

}  // namespace guild
