// Microscaling formats: rows of narrow codes with a narrow scale for every 32 or 16 of them.
//
//   MXFP8   FP8 codes (e4m3 or e5m2), an E8M0 scale for every 32: OCP Microscaling Formats (MX)
//           Specification 1.0
//   NVFP4   E2M1 codes, two per byte with the first in the low half, an e4m3 scale for every 16,
//           and one global float32 scale
//
// Blocks run along a row; a row's last block may be shorter. An element is its code times its
// block's scale and, in NVFP4, times the global scale.
#pragma once
#include "guild/cuda.h"
#include "guild/float8.h"

namespace guild {

enum class Microscaling : int { mxfp8_e4m3, mxfp8_e5m2, nvfp4 };

constexpr int64_t micro_block(Microscaling format) {
  return format == Microscaling::nvfp4 ? 16 : 32;
}

// MXFP8's scale, with amax the block's largest absolute value and L the format's largest value:
//   floor   2^(floor(log2(amax)) - floor(log2(L))), as in the specification; scaled values above L
//           saturate to L
//   ceil    the smallest power of two >= amax / L
enum class MicroRounding : int { floor, ceil };

// The layout of scales (rows, blocks):
//   rows      row-major
//   swizzled  as cuBLAS expects ("1D Block Scaling Factors Layout"): row-major tiles of 128 rows x
//             4 blocks, 512 bytes each, with scale (r, b) of a tile at byte
//             r % 32 * 16 + r / 32 * 4 + b. The last tiles are padded with zeros.
enum class ScaleOrder : int { rows, swizzled };

// Bytes of the scales of a matrix.
constexpr int64_t micro_scale_bytes(int64_t rows, int64_t columns, Microscaling format,
                                    ScaleOrder order) {
  int64_t const block = micro_block(format), blocks = (columns + block - 1) / block;
  if (order == ScaleOrder::rows) return rows * blocks;
  return (rows + 127) / 128 * 128 * ((blocks + 3) / 4 * 4);
}

// Quantises rows, rounding to nearest even and saturating to the largest code. A block with an
// infinity or a NaN gets a NaN scale and NaN codes, or zeros in E2M1, which has no NaN.
//
// NVFP4's block scale is e4m3(amax of the block / 6 / global scale). The global scale is given or
// max(amax of all finite blocks, 2^-100) / 2688. Codes are rounded from elements times
// 1 / (block scale * global scale), or zeros where the product of the scales is zero.
struct QuantizeMicro {
  int64_t rows = 0, columns = 0;  // columns: even for NVFP4
  DType dtype = DType::bfloat16;  // of x: bfloat16, float16, float32
  Microscaling format = Microscaling::mxfp8_e4m3;
  MicroRounding rounding = MicroRounding::floor;  // of MXFP8's scales
  ScaleOrder order = ScaleOrder::rows;
  ConstRows x = {};           // (rows, columns)
  Rows codes = {};            // (rows, columns) bytes out, half as many for NVFP4
  uint8_t* scales = nullptr;  // micro_scale_bytes() out
  float* global = nullptr;    // (1) of NVFP4: in if global_given, else out, if there are rows
  bool global_given = false;
  uint32_t* workspace = nullptr;  // (1) of NVFP4 on CUDA, where global is not given
};

// Converts MXFP8 codes, with an E8M0 scale for every 32 columns, to codes of the same format with a
// float32 scale for every 128 columns: the largest of the four scales. The other three blocks'
// codes are multiplied by the ratio of the scales and rounded again. This is exact unless the
// result is subnormal; in e4m3, elements of at least 2^-14 times the largest value that the new
// block can hold stay exact.
struct RegroupMicro {
  int64_t rows = 0, columns = 0;
  Float8 format = Float8::e4m3;
  ConstRows x = {};                   // (rows, columns) codes
  uint8_t const* x_scales = nullptr;  // (rows, ceil(columns / 32)), row by row
  Rows codes = {};                    // (rows, columns) out
  Scales scales = {};                 // (rows, ceil(columns / 128)) out
};

namespace cpu {
void quantize_micro(QuantizeMicro const& args);
void regroup_micro(RegroupMicro const& args);
}  // namespace cpu

namespace cuda {
void quantize_micro(QuantizeMicro const& args, Queue queue = {});
void regroup_micro(RegroupMicro const& args, Queue queue = {});
}  // namespace cuda

}  // namespace guild
