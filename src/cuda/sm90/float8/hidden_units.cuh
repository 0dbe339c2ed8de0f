// H of a tile as the down gradient reads it, 64 columns at a time: in 16 bits, or as codes with
// scales by row. The gradients of up, in float32, replace it in shared memory.
#pragma once
#include <cuda_fp8.h>

#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/float8/warp_rows.cuh"
#include "guild/float8.h"

namespace guild::cuda {

template <class T, StaticActivation known, bool of_codes>
struct HiddenUnits {
  CUtensorMap map;      // (columns, halves, rows), boxes of 64 x 1 x 64
  ConstScales scales;   // of codes, else H is of T
  int columns, blocks;  // of a half, and blocks of scales in it
  StaticPairing<known> pairing;

  static constexpr int kBoxBytes = 2 * kBlockBytes;  // 64 columns, 128 rows: both consumers'

  struct Values {
    float2 gate[4], up[4];
  };
  // Codes of 32 columns: a word holds two neighbours of row r and two of row r + 8.
  struct UnitCodes {
    uint32_t gate[4], up[4];
  };

  __device__ int boxes() const { return pairing == Pairing::none ? 1 : 2; }

  // H of 64 columns of the tile: a box of gate and one of up; two boxes of 32 pairs; or, without a
  // gate, one box. Boxes of codes are half as wide, but their rows as far apart.
  __device__ void load(Tile const& tile, int unit, char* to, Barrier& full) const {
    int const bytes = of_codes ? kBoxBytes / 2 : kBoxBytes;
    full.arrive_expect(boxes() * (tile.rows > 64 ? bytes : tile.rows > 0 ? bytes / 2 : 0));
    int const col = tile.col + 64 * unit;
    bool const pairs = pairing == Pairing::alternate && !of_codes, halves = boxes() == 2 && !pairs;
#pragma unroll 1
    for (int row = 0; row < tile.rows; row += 64, to += kBlockBytes) {
      for (int i = 0; i < boxes(); ++i) {
        int const x = of_codes ? col / 2 : pairs ? 2 * col + 64 * i : col;
        tma_load(map, to + i * kBoxBytes, Coordinate{x, halves ? i : 0, tile.row + row}, full);
      }
    }
  }

  // Scales of gate and up of rows r and r + 8 in the block of columns from `col` on.
  __device__ void load_scales(float (&scale)[2][2], Tile const& tile, int col, int thread) const {
    if constexpr (of_codes) {
      if (col >= columns) return;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        int const r = min(fragment_row(thread) + 8 * below, tile.rows - 1);
        float const* const of_row = scales.data + (tile.row + r) * scales.row_stride;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (half == boxes()) break;
          int const block = half * blocks + col / int(kScaleBlock);
          scale[half][below] = load_now(of_row + block * scales.col_stride);
        }
      }
    }
  }

  // The 32 columns from 8 * first on.
  __device__ void read_codes(UnitCodes& to, uint32_t stage, int first, int thread) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to.gate[i] = load_pairs(stage, first + i, thread);
      to.up[i] = boxes() == 2 ? load_pairs(stage + kBoxBytes, first + i, thread) : 0;
    }
  }

  // The 16 columns from 8 * block on.
  __device__ Values values_at(UnitCodes const& codes, float const (&scale)[2][2], uint32_t stage,
                              int block, int thread) const {
    Values to;
    if constexpr (of_codes) {
      values_of(to.gate, codes.gate, block, scale[0]);
      values_of(to.up, codes.up, block, scale[1]);
      return to;
    }
    Words const words = read_words(stage, block, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to.gate[i] = unpack<T>(words.gate[i]);
      to.up[i] = unpack<T>(words.up[i]);
    }
    return to;
  }
  // Leaves a thread's gradients of up of the 16 columns from 8 * block on where H of them was.
  __device__ void leave_up(float const (&up)[8], uint32_t stage, int block, int thread) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm volatile(
          "st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own_bytes(stage, block, i, thread)),
          "f"(up[4 * i]), "f"(up[4 * i + 1]), "f"(up[4 * i + 2]), "f"(up[4 * i + 3])
          : "memory");
    }
  }

  // Loads what leave_up() left of a unit; zeros if there is no unit.
  __device__ void load_up(float* up, uint32_t stage, int thread) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float* const v = up + 4 * i;
      v[0] = v[1] = v[2] = v[3] = 0;
      if (stage == 0) continue;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(own_bytes(stage, i / 2 * 2, i % 2, thread)));
    }
  }

 private:
  // H of 16 columns as a thread's sums are: a word holds two neighbours of a row.
  struct Words {
    uint32_t gate[4], up[4] = {0, 0, 0, 0};
  };

  // Codes are in the first half of a row, as it is before it is swizzled.
  static __device__ uint32_t load_pairs(uint32_t box, int block, int thread) {
    uint32_t const first = chunk_address(box, fragment_row(thread), 0) + fragment_column(thread);
    uint32_t const at = first ^ (8 * block);
    return load_shared_half(at) | load_shared_half(at + 8 * kRowBytes) << 16;
  }
  static __device__ void values_of(float2 (&to)[4], uint32_t const (&codes)[4], int block,
                                   float const (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const pair = codes[block % 4 + i / 2] >> (i % 2 * 16);
      __half2 const value(
          __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(pair & 0xffff), __NV_E4M3));
      float2 const v = __half22float2(value);
      to[i] = {v.x * scale[i % 2], v.y * scale[i % 2]};
    }
  }

  __device__ Words read_words(uint32_t stage, int block, int thread) const {
    Words to;
    if (pairing == Pairing::alternate) {
      read_alternating(to, stage, block, thread);
      return to;
    }
    uint32_t const at = matrices_address(stage, thread) ^ (16 * block);
    load_matrices(at, to.gate[0], to.gate[1], to.gate[2], to.gate[3]);
    if (pairing == Pairing::halves) {
      load_matrices(at + kBoxBytes, to.up[0], to.up[1], to.up[2], to.up[3]);
    }
    return to;
  }

  // Columns 2c and 2c + 1 are gate and up of column c: two neighbours of each are 8 bytes.
  static __device__ void read_alternating(Words& to, uint32_t stage, int block, int thread) {
    int const column = 2 * fragment_column(thread);
    uint32_t const start = chunk_address(stage, fragment_row(thread), column / 8) + column % 8 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const here = block + i / 2, below = i % 2;
      uint32_t const at = (start ^ (here % 4 * 32)) + here / 4 * kBoxBytes + below * 1024;
      uint32_t first, second;
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(at));
      to.gate[i] = __byte_perm(first, second, 0x5410);
      to.up[i] = __byte_perm(first, second, 0x7632);
    }
  }

  // A thread's 16 bytes, i of two, for the 16 columns from 8 * block on: where the warp has read H
  // of them. The first half of a unit of codes goes behind the codes.
  __device__ uint32_t own_bytes(uint32_t stage, int block, int i, int thread) const {
    if constexpr (of_codes) {
      int const chunk = (block < 4 ? 4 : 0) + 2 * i + thread % 32 / 16;
      uint32_t const box = stage + block / 2 % 2 * kBoxBytes;
      return chunk_address(box, thread / 32 * 16 + thread % 16, chunk);
    }
    uint32_t const at = matrices_address(stage, thread);
    if (pairing != Pairing::alternate) return (at ^ (16 * block)) + i * kBoxBytes;
    return (at ^ (16 * (2 * block % 8 + 2 * i))) + block / 4 * kBoxBytes;
  }
};

}  // namespace guild::cuda
