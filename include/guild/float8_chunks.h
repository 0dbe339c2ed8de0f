// FP8 operands of products that sum over rows: weight gradients.
//
// Such products need operands that are contiguous along the rows of a group. A chunk holds 128 rows
// of a group, transposed: (columns, 128) codes. Chunk j of group e, whose first row is o, is stored
// in slot o / 128 + e + j (integer division), so the offsets alone determine the slots and groups
// need no padding. A group's last chunk is filled up with zeros. Slots without a chunk are neither
// written nor read.
#pragma once
#include "guild/float8.h"

namespace guild {

// Slots for the chunks of `rows` rows in `groups` groups.
constexpr int64_t chunk_slots(int64_t rows, int64_t groups) { return rows / kScaleBlock + groups; }

// Quantises rows as chunks, with a scale for each block of 128 rows x 128 columns.
//
// x holds elements or, with x_scales, codes of the same format with a scale for every 128 columns
// of a row. From codes, the block's scale is the largest of its rows' scales, and at least the
// power-of-two scale of a block of zeros. Each code is multiplied by its row's scale / the block's
// scale and rounded again; with power-of-two scales this is exact unless the result is subnormal.
//
// With two halves, gate and up, no block spans both.
struct QuantizeChunks {
  int64_t rows = 0, groups = 0;
  int64_t columns = 0, halves = 1;  // columns: of a half
  int64_t tokens = 0;               // rows of x where they are gathered
  DType dtype = DType::bfloat16;    // of x: bfloat16, float16, float32; not read with x_scales
  Float8 format = Float8::e4m3;
  ScaleKind scale = ScaleKind::power_of_two;  // not read with x_scales
  int32_t const* offsets = nullptr;           // (groups + 1)
  int32_t const* row_token = nullptr;  // (rows) row of x, zeros if out of range; null: the same row
  ConstRows x = {};                    // (tokens or rows, halves * columns)
  // (tokens or rows, halves * ceil(columns / 128)); null data: x holds elements of dtype
  ConstScales x_scales = {};
  uint8_t* codes = nullptr;  // (slots, halves * columns, 128) out
  Scales scales = {};        // (slots, halves * ceil(columns / 128)) out; expert_stride is not read
};

// Chunks of one operand, as above. With two halves, the columns of one of them.
struct ConstChunks {
  uint8_t const* codes = nullptr;  // (slots, columns, 128)
  int64_t slot_stride = 0;         // bytes between slots; 0: columns * 128
  ConstScales scales = {};         // (slots, ceil(columns / 128)); expert_stride is not read
};

// D[e] = A^T B over the rows of group e; A has `out` columns, B has `in`. Chunks are accumulated in
// order, each scaled by the product of its two scales. For a group without rows D[e] is set to
// zero, or left unchanged with accumulate.
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
