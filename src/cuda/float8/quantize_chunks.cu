// quantize_chunks(): a thread block for each 128 columns of a slot or, of codes, for some of 256.
#include <cuda_pipeline_primitives.h>

#include "check_float8_chunks.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/float8/chunk_places.cuh"
#include "cuda/float8/tile.cuh"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

// ---- of elements
// ---------------------------------------------------------------------------------

struct ElementStorage {
  TurnedTile<kScaleBlock> tile;
  uint32_t largest[kTileThreads / 32];
  ChunkRows rows;
};

template <class T, Steps steps, Float8 format>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 2 ? 4 : 2) elements_kernel(
    ChunkArgs const x, ScaleKind const kind) {
  __shared__ ElementStorage smem;
  int const across = x.halves * x.blocks, block = blockIdx.x % across, slot = blockIdx.x / across;
  find_chunk(x.groups, slot, smem.rows);
  if (smem.rows.count == 0) return;
  int const first = block % x.blocks * int(kScaleBlock), half = block / x.blocks;
  int const columns = min(x.columns - first, int(kScaleBlock));
  int const column = half * x.columns + first;
  T const* const from = static_cast<T const*>(x.x) + column + patch_column();
  int row[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    row[i] = source_row(smem.rows, patch_row() + i, x.row_token, x.tokens);
  }
  Raw<T> raw[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    int const count = row[i] >= 0 ? columns - patch_column() : 0;
    raw[i] = load_raw<T, steps>(from + row[i] * x.x_stride, 1, count, false);
  }
  uint32_t const largest = largest_of_block(largest_magnitude<T>(raw), smem.largest);
  BlockScale const scale = block_scale(__uint_as_float(largest), format, kind);
  if (threadIdx.x == 0) {
    x.scales[slot * x.scale_slot_stride + block * x.scale_column_stride] = scale.to_value;
  }
  PatchCodes codes;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    codes[i] = encode_eight<format>(unpack_raw<T>(raw[i]), scale.to_code);
    if (row[i] < 0) codes[i] = {0, 0};  // whatever the scale
  }
  smem.tile.put(patch_column(), codes);
  __syncthreads();
  store_turned(smem.tile, {x.place(slot, column), kScaleBlock, true}, int(kScaleBlock), columns);
}

// ---- of codes
// ------------------------------------------------------------------------------------

// Blocks go through all chunks before they go on to other columns: rows that are gathered several
// times are still in L2 then.
//
// A block of threads turns several tiles of 256 columns, one after the other: while it works on
// one, each thread's share of the next, 16 columns of eight rows, is on its way to shared memory.
// What a tile waits for one after the other, rows, their codes and scales, takes longer than its
// work.
constexpr int kWide = 2 * int(kScaleBlock), kTilesOfBlock = 4;

struct CodeStorage {
  TurnedTile<kWide> tile;
  uint4 next[kPatch][kTileThreads];
  int row[kScaleBlock];            // in x; -1: zeros
  float quotient[2][kScaleBlock];  // of each row in each half of the columns; -1: zeros
  uint32_t largest[kTileThreads / 32];
  ChunkRows rows;
};

// A tile of a chunk: its columns, and the first of its two blocks of scales.
struct CodeTile {
  int column, columns, block;

  __device__ CodeTile(ChunkArgs const& x, int index) {
    int const pairs = (x.blocks + 1) / 2, half = int(index >= pairs), pair = index - half * pairs;
    column = half * x.columns + pair * kWide;
    columns = min(x.columns - pair * kWide, kWide);
    block = half * x.blocks + 2 * pair;
  }
};

// Starts loads of a thread's codes of a tile.
template <bool aligned>
__device__ void load_codes(ChunkArgs const& x, CodeTile const& tile, CodeStorage& smem) {
  int const column = int(threadIdx.x) % 16 * 16, left = tile.columns - column;
  uint8_t const* const from = static_cast<uint8_t const*>(x.x) + tile.column + column;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    int const row = smem.row[patch_row() + i];
    bool const exists = row >= 0 && left > 0;
    uint8_t const* const here = exists ? from + row * x.x_stride : static_cast<uint8_t const*>(x.x);
    uint4& to = smem.next[i][threadIdx.x];
    if constexpr (aligned) {
      __pipeline_memcpy_async(&to, here, 16, exists ? 0 : 16);
    } else {
      uint32_t word[4] = {};
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (exists && j < left) word[j / 4] |= uint32_t(here[j]) << 8 * (j % 4);
      }
      to = {word[0], word[1], word[2], word[3]};
    }
  }
  __pipeline_commit();
}

// Thread t has the scale of row t % 128 in half t / 128 of the columns: 0 where there is none.
__device__ inline float scale_of_row(ChunkArgs const& x, CodeTile const& tile,
                                     CodeStorage const& smem) {
  int const row = smem.row[threadIdx.x % int(kScaleBlock)];
  int const half = threadIdx.x / int(kScaleBlock);
  if (row < 0 || half * int(kScaleBlock) >= tile.columns) return 0;
  return x.x_scales[row * x.x_scale_row_stride + (tile.block + half) * x.x_scale_column_stride];
}

// The quotient of each row's scale by the largest of its half, which is at least that of a block of
// zeros; stores the largest ones. Returns whether all quotients are powers of two.
template <Float8 format>
__device__ bool divide_scales(ChunkArgs const& x, CodeTile const& tile, int slot, float own,
                              CodeStorage& smem) {
  uint32_t const least = magnitude(block_scale(0, format, ScaleKind::power_of_two).to_value);
  uint32_t largest = __reduce_max_sync(~0u, max(magnitude(own), least));
  if (threadIdx.x % 32 == 0) smem.largest[threadIdx.x / 32] = largest;
  __syncthreads();
  int const half = threadIdx.x / int(kScaleBlock), row = threadIdx.x % int(kScaleBlock);
#pragma unroll
  for (int i = 0; i < kTileThreads / 64; ++i) largest = max(largest, smem.largest[half * 4 + i]);
  float const of_block = __uint_as_float(largest);
  float const quotient = smem.row[row] < 0 ? -1.f : own / of_block;
  smem.quotient[half][row] = quotient;
  if (row == 0 && half * int(kScaleBlock) < tile.columns) {
    x.scales[slot * x.scale_slot_stride + (tile.block + half) * x.scale_column_stride] = of_block;
  }
  return __syncthreads_and((__float_as_uint(quotient) & 0x7fffff) == 0);
}

// Four codes times `quotient`, rounded again. by_half: a power of two of at most 1, with which
// E4M3's products are exact in half precision, or below half of the smallest code.
template <Float8 format, bool by_half>
__device__ inline uint32_t rescale_four(uint32_t codes, float quotient) {
  if constexpr (by_half) {
    __half2 const factor = __float2half2_rn(quotient);
    auto const pair = [&](uint32_t two) -> uint32_t {
      __half2 const value(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(two), __NV_E4M3));
      return __nv_cvt_halfraw2_to_fp8x2(__half2_raw(__hmul2(value, factor)), __NV_SATFINITE,
                                        __NV_E4M3);
    };
    return pair(codes & 0xffff) | pair(codes >> 16) << 16;
  }
  float4 const v = decode_four<format>(codes);
  return encode_four<format>(v.x * quotient, v.y * quotient, v.z * quotient, v.w * quotient);
}

// codes is left undefined.
template <Float8 format, bool by_half>
__device__ inline void turn_patch(uint4 (&codes)[kPatch], CodeStorage& smem) {
  int const column = int(threadIdx.x) % 16 * 16;
  float const* const quotients = smem.quotient[column / int(kScaleBlock)] + patch_row();
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    PatchCodes part;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      float const quotient = quotients[i];
      auto const rescale = [&](uint32_t four) {
        return quotient < 0 ? 0 : rescale_four<format, by_half>(four, quotient);
      };
      part[i] = {rescale(codes[i].x), rescale(codes[i].y)};
    }
    smem.tile.put(column + 8 * side, part);
#pragma unroll
    for (uint4& c : codes) {  // one side after the other: both together take too many registers
      c.x = c.z, c.y = c.w;
      asm volatile("" : "+r"(c.x), "+r"(c.y)::"memory");
    }
  }
}

template <bool aligned, Float8 format>
__global__ void __launch_bounds__(kTileThreads, aligned ? 3 : 2) codes_kernel(ChunkArgs const x) {
  extern __shared__ __align__(16) char memory[];
  CodeStorage& smem = *reinterpret_cast<CodeStorage*>(memory);
  int const tiles = x.halves * ((x.blocks + 1) / 2);
  int const slot = blockIdx.x;
  int index = blockIdx.y * kTilesOfBlock;
  int const end = min(index + kTilesOfBlock, tiles);
  find_chunk(x.groups, slot, smem.rows);
  if (smem.rows.count == 0) return;
  if (threadIdx.x < kScaleBlock) {
    smem.row[threadIdx.x] = source_row(smem.rows, threadIdx.x, x.row_token, x.tokens);
  }
  __syncthreads();
  load_codes<aligned>(x, CodeTile(x, index), smem);
  float scale = scale_of_row(x, CodeTile(x, index), smem);
  for (; index < end; ++index) {
    CodeTile const tile(x, index);
    __pipeline_wait_prior(0);
    uint4 codes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) codes[i] = smem.next[i][threadIdx.x];
    float const own = scale;
    if (index + 1 < end) {
      CodeTile const next(x, index + 1);
      load_codes<aligned>(x, next, smem);
      scale = scale_of_row(x, next, smem);
    }
    if (divide_scales<format>(x, tile, slot, own, smem)) {
      turn_patch<format, format == Float8::e4m3>(codes, smem);
    } else {
      turn_patch<format, false>(codes, smem);
    }
    __syncthreads();
    store_turned(smem.tile, {x.place(slot, tile.column), kScaleBlock, true}, int(kScaleBlock),
                 tile.columns);
  }
}

// ---- launch
// --------------------------------------------------------------------------------------

// across: blocks of threads for a chunk.
unsigned grid_of(QuantizeChunks const& x, int64_t across) {
  int64_t const blocks = chunk_slots(x.rows, x.groups) * across;
  require(blocks <= (int64_t(1) << 31) - 1, "rows: expected fewer than 2^31 blocks, got ", blocks);
  return unsigned(blocks);
}

void launch(QuantizeChunks const& x, ChunkArgs const& args, Queue const& queue) {
  auto const address = reinterpret_cast<uintptr_t>(x.x.data);
  with_format(x.format, [&](auto format) {
    if (x.x_scales.data != nullptr) {
      bool const aligned = address % 16 == 0 && args.x_stride % 16 == 0 && args.columns % 16 == 0;
      auto const kernel =
          aligned ? codes_kernel<true, format.value> : codes_kernel<false, format.value>;
      constexpr int bytes = sizeof(CodeStorage);
      cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "shared memory of quantize_chunks");
      int64_t const tiles = x.halves * ceil_div(args.blocks, 2);
      dim3 const grid(grid_of(x, 1), unsigned(ceil_div(tiles, kTilesOfBlock)));
      kernel<<<grid, kTileThreads, bytes, queue.stream>>>(args);
      return;
    }
    with_element(x.dtype, [&](auto element) {
      using T = decltype(element);
      int const unit = 16 / sizeof(T);
      bool const aligned = address % 16 == 0 && args.x_stride % unit == 0 && args.columns % 8 == 0;
      auto const kernel = aligned ? elements_kernel<T, Steps::next, format.value>
                                  : elements_kernel<T, Steps::any, format.value>;
      kernel<<<grid_of(x, x.halves * args.blocks), kTileThreads, 0, queue.stream>>>(args, x.scale);
    });
  });
  cuda_check(cudaGetLastError(), "launch of quantize_chunks");
}

}  // namespace

void quantize_chunks(QuantizeChunks const& x, Queue queue) {
  check(x);
  require(reinterpret_cast<uintptr_t>(x.codes) % 16 == 0,
          "codes: expected 16-byte aligned data on CUDA, got address ",
          static_cast<void const*>(x.codes));
  if (x.rows == 0) return;
  int64_t const width = x.halves * x.columns;
  launch(x,
         {.groups = expert_groups(x.offsets, x.groups, x.rows),
          .x = x.x.data,
          .x_stride = row_stride(x.x, width),
          .x_scales = x.x_scales.data,
          .x_scale_row_stride = x.x_scales.row_stride,
          .x_scale_column_stride = x.x_scales.col_stride,
          .row_token = x.row_token,
          .tokens = int(x.tokens),
          .columns = int(x.columns),
          .halves = int(x.halves),
          .blocks = int(ceil_div(x.columns, kScaleBlock)),
          .codes = x.codes,
          .scales = x.scales.data,
          .scale_slot_stride = x.scales.row_stride,
          .scale_column_stride = x.scales.col_stride},
         queue);
}

}  // namespace guild::cuda
