// Writes results as FP8 chunks (guild/float8_chunks.h) next to their quantisation by row: a tile's
// 128 rows are one chunk, 64 per consumer.
//
// A chunk's scale follows from its largest magnitude, so the consumers' warps exchange theirs. Each
// consumer writes its half of every column, 64 bytes.
#pragma once
#include "cuda/float8/rescale.cuh"
#include "cuda/sm90/float8/chunk_map.h"
#include "cuda/sm90/float8/quantized_fragment.cuh"

namespace guild::cuda {

// (slots, halves of `columns` columns, 128) codes and a scale for every 128 columns of a half;
// codes null: not wanted.
struct ChunkOutput {
  CUtensorMap map;  // (128, columns, halves, slots), boxes of 64 x 128 x 1 x 1
  uint8_t* codes;
  Scales scales;
  int columns, blocks, halves;  // of a half: columns, blocks of them

  __device__ uint8_t* place(int slot, int half, int col) const {
    return codes + ((int64_t(slot) * halves + half) * columns + col) * kScaleBlock;
  }
  __device__ void put_scale(int slot, int half, int col, float scale) const {
    int const block = half * blocks + col / int(kScaleBlock);
    scales.data[slot * scales.row_stride + block * scales.col_stride] = scale;
  }
};

// Bits of the largest magnitudes in a block of gate, up and A'. As integers they order like the
// values, with NaN above all.
struct Magnitudes {
  uint32_t gate, up, a;
};
inline constexpr int kMagnitudes = 3;

// Largest values of both consumers' rows, in shared memory.
struct ChunkExchange {
  // Two, used in turns, for both consumers; one for the first alone.
  alignas(16) uint32_t of_warp[3][8][kMagnitudes + 1];
  Barrier told;      // of both: by each of their warps
  uint32_t turn[8];  // of each warp, the parity of its next wait

  __device__ void init() {
    told.init(8);
    for (uint32_t& t : turn) t = 0;
  }
};

// One consumer's part of a chunk.
struct ChunkShare {
  ChunkExchange& exchange;
  int group;
  bool both;  // else the chunk's rows are all of the first consumer

  // Called by whole warps.
  __device__ void tell(Magnitudes const& own, int thread) const {
    uint32_t const gate = __reduce_max_sync(~0u, own.gate), up = __reduce_max_sync(~0u, own.up);
    uint32_t const a = __reduce_max_sync(~0u, own.a);
    if (thread % 32 == 0) {
      int const warp = 4 * group + thread / 32;
      auto& to = exchange.of_warp[both ? exchange.turn[warp] : 2][warp];
      *reinterpret_cast<uint4*>(to) = {gate, up, a, 0};
      if (both) exchange.told.arrive();
    }
  }
  // Which of the Magnitudes a lane gets from heard(): eight lanes each.
  static __device__ int heard_by(int lane) { return min(lane / 8, kMagnitudes - 1); }
  // Called by all threads of the consumer; they must meet at a barrier before the next tell().
  __device__ uint32_t heard(int thread) const {
    uint32_t& turn = exchange.turn[4 * group + thread / 32];
    uint32_t const of = both ? turn : 2;
    __syncwarp();
    if (both) {
      exchange.told.wait(of);
      if (thread % 32 == 0) turn = of ^ 1;
    } else {
      warpgroup_barrier();
    }
    int const warp = thread % 8;
    uint32_t most = exchange.of_warp[of][warp][heard_by(thread % 32)];
    if (warp >= 4 && !both) most = 0;
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) most = max(most, __shfl_xor_sync(~0u, most, lanes));
    return most;
  }
};

// Multiplies codes by powers of two of at most 1 and rounds them again.
template <Float8 format>
__device__ inline void scale_codes(CodeWords& codes, float const (&factor)[2]) {
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    float const f = factor[below];
    uint32_t const in_half = half_factor(f);
    auto const scaled = [f](uint32_t pair) {
      __half2 const value(
          __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(pair & 0xffff), kHardwareFormat<format>));
      float2 const v = __half22float2(value);
      return encode_pair<format>(v.x * f, v.y * f);
    };
#pragma unroll
    for (uint32_t& word : codes.word[below]) {
      if constexpr (format == Float8::e4m3) {
        word = scale_e4m3(word, in_half);
      } else {
        word = scaled(word) | scaled(word >> 16) << 16;
      }
    }
  }
}

// Clears the codes of rows that a tile does not have.
__device__ inline void clear_absent(CodeWords& codes, Tile const& tile, int thread) {
  if (tile.rows >= 64) return;
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    bool const present = fragment_row(thread) + 8 * below < tile.rows;
#pragma unroll
    for (uint32_t& word : codes.word[below]) word = present ? word : 0;
  }
}

// A transposed ("turned") box: 128 columns of 64 bytes, two per 128-byte line, in TMA's 64-byte
// swizzle. Each warp's rows are a piece of 16 bytes. Accesses along columns and along pieces are
// free of bank conflicts.
__device__ inline uint32_t piece_address(uint32_t box, int column, int piece) {
  int const line = column / 2;
  return box + line * 128 + (column % 2 * 4 + (piece ^ line % 4)) * 16;
}

// Writes the first `columns` columns, in which rows r and r + 8 follow each other: a thread has
// both.
__device__ inline void turn_codes(uint32_t box, CodeWords const& codes, int columns, int thread) {
  uint32_t const first = piece_address(box, thread % 32, thread / 32);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    if (16 * i >= columns) break;
    uint32_t word[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t const upper = codes.word[0][i + j], lower = codes.word[1][i + j];
      word[2 * j] = __byte_perm(upper, lower, 0x5140);
      word[2 * j + 1] = __byte_perm(upper, lower, 0x7362);
    }
    store_matrices_transposed(first + 1024 * i, word[0], word[1], word[2], word[3]);
  }
}

// Puts the rows of the warp's pieces in order, two pieces at a time: with four, some kernels spill.
__device__ inline void order_rows(uint32_t box, int columns, int thread) {
  uint32_t const first = piece_address(box, thread % 32, thread / 32);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    if (32 * i >= columns) break;
    uint4 piece[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) piece[j] = load_shared_16(first + 2048 * (i + j));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint4 const w = piece[j];
      store_shared_16(first + 2048 * (i + j),
                      {__byte_perm(w.x, w.y, 0x6420), __byte_perm(w.z, w.w, 0x6420),
                       __byte_perm(w.x, w.y, 0x7531), __byte_perm(w.z, w.w, 0x7531)});
    }
  }
}

// Stores a turned box that the consumer has written, the chunk's columns of `half` from `col` on.
// If the consumer is alone, the other one's 64 bytes become zeros.
__device__ inline void store_turned(ChunkOutput const& out, uint32_t box, int slot, int half,
                                    int col, ChunkShare const& share, int thread) {
  if (thread == 0) tma_store_at(out.map, box, {32 * share.group, col, half, slot});
  if (share.both) return;
  uint8_t* const other = out.place(slot, half, col) + 64 + thread % 4 * 16;
#pragma unroll 1
  for (int i = thread / 4; i < min(out.columns - col, int(kScaleBlock)); i += 32) {
    *reinterpret_cast<uint4*>(other + i * kScaleBlock) = {0, 0, 0, 0};
  }
}

}  // namespace guild::cuda
