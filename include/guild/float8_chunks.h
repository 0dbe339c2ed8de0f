// FP8 operands of sums over rows: weight gradients.
//
// Such a product needs both operands with the rows of a group contiguous. A chunk is 128 rows of a
// group, counted from its first, transposed: (columns, 128) codes. Chunk j of group e, which begins
// at row o, is in slot o / 128 + e + j, so the slots follow from the offsets alone and no group is
// padded. Rows that a group's last chunk lacks are zeros. Slots that belong to no chunk are neither
// written nor read.
#pragma once
#include "guild/float8.h"

namespace guild {

// Slots for the chunks of `rows` rows in `groups` groups.
constexpr int64_t chunk_slots(int64_t rows, int64_t groups) { return rows / kScaleBlock + groups; }

// Quantises rows as chunks, with a scale for each block of 128 rows x 128 columns.
//
// x holds elements or, with x_scales, codes of the same format, with a scale for every 128 columns
// of a row. The block's scale is then the largest scale of its rows, or the power of two that a
// block of zeros has if that is larger. Each code is multiplied by its row's scale over the block's
// and rounded to a code again. If both scales are powers of two, this is exact unless the result is
// subnormal.
//
// Columns may be in two halves, gate and up. A block then has columns of one half only.
struct QuantizeChunks {
  int64_t rows = 0, groups = 0;
  int64_t columns = 0, halves = 1;  // columns: of a half
  int64_t tokens = 0;               // rows of x where they are gathered
  DType dtype = DType::bfloat16;    // of x: bfloat16, float16, float32; not read with x_scales
  Float8 format = Float8::e4m3;
  ScaleKind scale = ScaleKind::power_of_two;  // not read with x_scales
  int32_t const* offsets = nullptr;           // (groups + 1)
  int32_t const* row_token =
      nullptr;                // (rows) row of x, zeros if there is none; null: the same row
  ConstRows x = {};           // (tokens or rows, halves * columns)
  ConstScales x_scales = {};  // (tokens or rows, halves * ceil(columns / 128)); null data:
                              // x holds elements of dtype
  uint8_t* codes = nullptr;   // (slots, halves * columns, 128) out
  Scales scales = {};         // (slots, halves * ceil(columns / 128)) out; expert_stride is
                              // not read
};

// Chunks of one operand, as above; the columns of one half, or all of them where there is only one.
struct ConstChunks {
  uint8_t const* codes = nullptr;  // (slots, columns, 128)
  int64_t slot_stride = 0;         // from slot to slot; 0: columns * 128
  ConstScales scales = {};         // (slots, ceil(columns / 128)); expert_stride is not read
};

// D[e] = A^T B over the rows of group e; A has `out` columns, B has `in`. Chunks are summed one
// after the other, each scaled by the product of its two scales. A group without rows gets zeros,
// or with accumulate is left unchanged.
struct ChunkProduct {
  int64_t rows = 0, groups = 0, out = 0, in = 0;
  Float8 a_format = Float8::e4m3;    // b is e4m3
  int32_t const* offsets = nullptr;  // (groups + 1)
  ConstChunks a = {}, b = {};
  DType d_dtype = DType::bfloat16;  // bfloat16, float16, float32
  bool accumulate = false;          // add to D instead of writing it
  Weight d = {};                    // (E, out, in)
};

}  // namespace guild
