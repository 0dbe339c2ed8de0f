// Quantisation of results in registers: 64 rows x 128 columns of a fragment (fragment.cuh), one
// block of scales of each row, of which the four threads of a quad have a share.
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
  int columns;
  Float8 format;
  ScaleKind kind;
};

// The largest absolute value over the columns of rows r and r + 8, the same in all threads of the
// quad; NaN if any is NaN.
__device__ inline void largest_of_rows(float const* value, float (&largest)[2]) {
  auto const larger = [](float& most, float x) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(x)));
  };
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i % 4 / 2 == below) larger(most, value[i]);
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) larger(most, __shfl_xor_sync(~0u, most, lanes));
    largest[below] = most;
  }
}

template <Float8 format>
__device__ inline uint16_t encode_pair(float x, float y) {
  constexpr auto kind = format == Float8::e4m3 ? __NV_E4M3 : __NV_E5M2;
  return __nv_cvt_float2_to_fp8x2({x, y}, __NV_SATFINITE, kind);
}

template <Float8 format>
__device__ inline void codes_to_box(uint32_t box, float const* value, float upper, float lower,
                                    int thread) {
  uint32_t const row = box + fragment_row(thread) * kRowBytes + fragment_column(thread);
  int const swizzle = thread % 32 / 4;  // row % 8, of both rows
#pragma unroll
  for (int block = 0; block < 16; ++block) {
    uint32_t const at = row + ((block / 2 ^ swizzle) * 16) + block % 2 * 8;
    float const* const v = value + 4 * block;
    store_shared_half(at, encode_pair<format>(v[0] * upper, v[1] * upper));
    store_shared_half(at + 8 * kRowBytes, encode_pair<format>(v[2] * lower, v[3] * lower));
  }
}

// Quantises the tile's 128 columns from `col` of `half` on, 64 values a thread, and stores them.
// The warp's rows of `box` are free to be written.
__device__ inline void put_codes(CodeOutput const& out, float const* value, uint32_t box,
                                 Tile const& tile, int col, int half, int thread) {
  constexpr int kBlock = kScaleBlock;
  float largest[2], to_code[2];
  largest_of_rows(value, largest);
  int const blocks = (out.columns + kBlock - 1) / kBlock;
  float* const to = out.scales.data + (half * blocks + col / kBlock) * out.scales.col_stride;
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    BlockScale const scale = block_scale(largest[below], out.format, out.kind);
    to_code[below] = scale.to_code;
    int const r = fragment_row(thread) + 8 * below;
    if (thread % 4 == 0 && r < tile.rows) {
      to[(tile.row + r) * out.scales.row_stride] = scale.to_value;
    }
  }
  if (out.format == Float8::e4m3) {
    codes_to_box<Float8::e4m3>(box, value, to_code[0], to_code[1], thread);
  } else {
    codes_to_box<Float8::e5m2>(box, value, to_code[0], to_code[1], thread);
  }
  out.codes.store(box, tile, half * out.columns + col, (half + 1) * out.columns, thread);
}

}  // namespace guild::cuda
