// Quantises results in registers: fragments (fragment.cuh) of 64 rows x 128 columns. Each row is
// one block with one scale, shared by the four threads of a quad.
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

// The scales of rows r and r + 8 in `halves` halves: what their values are multiplied by to give
// codes, and the reverse.
template <int halves>
struct RowScales {
  float to_code[halves][2], to_value[halves][2];
};

// Makes `most` the larger of it and |x|; NaN if either is NaN.
__device__ inline void take_larger(float& most, float x) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(x)));
}
// The same for two values of T at a time, with any sign: |most| becomes the larger magnitude.
template <class T>
__device__ inline void take_larger_pair(uint32_t& most, uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(most) : "r"(pair));
  } else {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(pair));
  }
}
// The larger magnitude of the two.
template <class T>
__device__ inline float larger_of_pair(uint32_t pair) {
  float2 const value = unpack<T>(pair);
  float most = 0;
  take_larger(most, value.x);
  take_larger(most, value.y);
  return most;
}

// The largest absolute values of a thread's share of rows r and r + 8; NaN if any is NaN.
__device__ inline void largest_of_rows(float const* value, float (&largest)[2]) {
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    largest[below] = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i % 4 / 2 == below) take_larger(largest[below], value[i]);
    }
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

// Makes the scales of the tile's 128 columns from `col` on, in `halves` halves of which the first
// is `half`, and stores those of the first `count`. largest: of each thread's share. Each thread of
// a quad makes one of the four scales; of one half, two threads make the same.
template <int halves>
__device__ inline RowScales<halves> put_scales(float const (&largest)[halves][2],
                                               CodeOutput const& out, Tile const& tile, int col,
                                               int half, int count, int thread) {
  bool const below = thread % 2 == 1, second = thread % 4 >= 2;
  float of_row[halves];
#pragma unroll
  for (int i = 0; i < halves; ++i) {
    float const upper = largest[i][0], lower = largest[i][1];
    of_row[i] = below ? lower : upper;
    take_larger(of_row[i], __shfl_xor_sync(~0u, below ? upper : lower, 1));
  }
  float const of_first = of_row[0], of_last = of_row[halves - 1];
  float own = second ? of_last : of_first;
  take_larger(own, __shfl_xor_sync(~0u, second ? of_first : of_last, 2));
  BlockScale const scale = block_scale(own, out.format, out.kind);
  int const r = fragment_row(thread) + (below ? 8 : 0);
  if ((!second || count > 1) && r < tile.rows) {
    int const block = (half + (second ? 1 : 0)) * out.blocks + col / int(kScaleBlock);
    out.scales.data[(tile.row + r) * out.scales.row_stride + block * out.scales.col_stride] =
        scale.to_value;
  }
  RowScales<halves> to;
#pragma unroll
  for (int i = 0; i < 2 * halves; ++i) {
    to.to_code[i / 2][i % 2] = __shfl_sync(~0u, scale.to_code, i, 4);
    to.to_value[i / 2][i % 2] = __shfl_sync(~0u, scale.to_value, i, 4);
  }
  return to;
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
  float largest[1][2];
  largest_of_rows(value, largest[0]);
  RowScales<1> const scales = put_scales(largest, out, tile, col, half, 1, thread);
  CodeWords codes;
  encode(codes, out, value, scales.to_code[0]);
  codes_to_box(codes, box, thread);
  __syncwarp();
  out.codes.store_codes(box, tile, half * out.columns + col, (half + 1) * out.columns, thread);
  __syncwarp();
}

}  // namespace guild::cuda
