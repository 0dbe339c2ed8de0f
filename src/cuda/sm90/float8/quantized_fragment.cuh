// Quantisation of results in registers: 64 rows x 128 columns of a fragment (fragment.cuh). Each
// row is one block with one scale, shared by the four threads of a quad.
#pragma once
#include <cuda_fp8.h>

#include "cuda/sm90/float8/warp_rows.cuh"
#include "shared/float8.h"

namespace guild::cuda {

// Codes by row in one or two halves of `columns` columns, and a scale for each row's blocks of 128
// in each half.
struct CodeOutput {
  ByteRows codes;
  Scales scales;
  int columns, blocks;  // of a half
  Float8 format;
  ScaleKind kind;
};

// A thread's share: word[below][i] holds, of row r or r + 8, its two columns of the fragment's
// block 2i and its two of block 2i + 1.
struct CodeWords {
  uint32_t word[2][8];
};

// The same with the values that the rows' scales follow from, and the scales.
struct QuantizedRows {
  CodeWords codes;
  float largest[2], to_value[2];
};

// Makes `most` the larger of it and |x|; NaN if either is NaN.
__device__ inline void take_larger(float& most, float x) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(x)));
}
// Combines what the threads of a quad have found in their shares; the same in all of them.
__device__ inline void largest_of_quad(float& most) {
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    take_larger(most, __shfl_xor_sync(~0u, most, lanes));
  }
}

// The largest absolute value over the columns of rows r and r + 8, the same in all threads of the
// quad; NaN if any is NaN.
__device__ inline void largest_of_rows(float const* value, float (&largest)[2]) {
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i % 4 / 2 == below) take_larger(most, value[i]);
    }
    largest_of_quad(most);
    largest[below] = most;
  }
}

template <Float8 format>
inline constexpr auto kHardwareFormat = format == Float8::e4m3 ? __NV_E4M3 : __NV_E5M2;

template <Float8 format>
__device__ inline uint32_t encode_pair(float x, float y) {
  return __nv_cvt_float2_to_fp8x2({x, y}, __NV_SATFINITE, kHardwareFormat<format>);
}

template <Float8 format>
__device__ inline void encode(CodeWords& codes, float const* value, float const (&to_code)[2]) {
#pragma unroll
  for (int below = 0; below < 2; ++below) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float const *const v = value + 8 * i + 2 * below, f = to_code[below];
      codes.word[below][i] =
          encode_pair<format>(v[0] * f, v[1] * f) | encode_pair<format>(v[4] * f, v[5] * f) << 16;
    }
  }
}

// Stores the scales of the tile's 128 columns from `col` of `half` on, which follow from
// to.largest, and makes their inverses.
__device__ inline void put_scales(QuantizedRows& to, float (&to_code)[2], CodeOutput const& out,
                                  Tile const& tile, int col, int half, int thread) {
  int const block = half * out.blocks + col / int(kScaleBlock);
  float* const scales = out.scales.data + block * out.scales.col_stride;
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    BlockScale const scale = block_scale(to.largest[below], out.format, out.kind);
    to_code[below] = scale.to_code;
    to.to_value[below] = scale.to_value;
    int const r = fragment_row(thread) + 8 * below;
    if (thread % 4 == 0 && r < tile.rows) {
      scales[(tile.row + r) * out.scales.row_stride] = scale.to_value;
    }
  }
}

// The codes of 64 values a thread.
__device__ inline void encode(CodeWords& codes, CodeOutput const& out, float const* value,
                              float const (&to_code)[2]) {
  if (out.format == Float8::e4m3) {
    encode<Float8::e4m3>(codes, value, to_code);
  } else {
    encode<Float8::e5m2>(codes, value, to_code);
  }
}

// Writes codes to the warp's rows of `box`, which are free to be written.
__device__ inline void codes_to_box(CodeWords const& codes, uint32_t box, int thread) {
  uint32_t const first = matrices_address(box, thread);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    store_matrices(first ^ (16 * i), codes.word[0][i], codes.word[1][i], codes.word[0][i + 1],
                   codes.word[1][i + 1]);
  }
}

// Quantises the tile's 128 columns from `col` of `half` on, 64 values a thread, and stores them
// through the warp's rows of `box`.
__device__ inline void put_codes(CodeOutput const& out, float const* value, uint32_t box,
                                 Tile const& tile, int col, int half, int thread) {
  QuantizedRows rows;
  float to_code[2];
  largest_of_rows(value, rows.largest);
  put_scales(rows, to_code, out, tile, col, half, thread);
  encode(rows.codes, out, value, to_code);
  codes_to_box(rows.codes, box, thread);
  __syncwarp();
  out.codes.store_codes(box, tile, half * out.columns + col, (half + 1) * out.columns, thread);
  __syncwarp();
}

}  // namespace guild::cuda
