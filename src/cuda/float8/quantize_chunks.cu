// quantize_chunks(): a thread block for each 128 columns of a slot, from elements or from codes.
#include "check_float8_chunks.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/float8/tile.cuh"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

struct ChunkArgs {
  Groups groups;
  void const* x;
  int64_t x_stride;
  float const* x_scales;
  int64_t x_scale_row_stride, x_scale_column_stride;
  int32_t const* row_token;
  int tokens;
  int columns, halves, blocks;  // of a half: columns, blocks of them
  uint8_t* codes;
  float* scales;
  int64_t scale_slot_stride, scale_column_stride;
};

struct ChunkStorage {
  TurnedTile tile;
  uint32_t largest[kTileThreads / 32];
  int first, count;  // rows of the slot's chunk
};

// Finds the group whose chunk the slot holds: groups' slots rise with their number, so at most one
// thread finds its own. count is 0 where there is none.
__device__ void find_chunk(Groups const& groups, int slot, ChunkStorage& smem) {
  if (threadIdx.x == 0) smem.count = 0;
  __syncthreads();
  for (int group = threadIdx.x; group < groups.groups; group += kTileThreads) {
    int const begin = groups.start(group), end = groups.end(group, begin);
    int const chunk = slot - (begin / int(kScaleBlock) + group);
    int const left = end - begin - chunk * int(kScaleBlock);
    if (chunk >= 0 && left > 0) {
      smem.first = begin + chunk * int(kScaleBlock);
      smem.count = min(left, int(kScaleBlock));
    }
  }
  __syncthreads();
}

// Where the patch's rows are in x; -1: they are zeros.
__device__ void find_rows(ChunkArgs const& x, int first, int count, int (&row)[kPatch]) {
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    row[i] = patch_row() + i < count ? first + patch_row() + i : -1;
    if (x.row_token != nullptr && row[i] >= 0) {
      int const token = x.row_token[row[i]];
      row[i] = unsigned(token) < unsigned(x.tokens) ? token : -1;
    }
  }
}

// The patch's codes from elements; returns the scale.
template <class T, Steps steps, Float8 format>
__device__ float encode_elements(ChunkArgs const& x, ScaleKind kind, int const (&row)[kPatch],
                                 int column, int columns, ChunkStorage& smem, PatchCodes& codes) {
  Raw<T> raw[kPatch];
  T const* const from = static_cast<T const*>(x.x) + column + patch_column();
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    int const count = row[i] >= 0 ? columns - patch_column() : 0;
    raw[i] = load_raw<T, steps>(from + row[i] * x.x_stride, 1, count, false);
  }
  uint32_t const largest = largest_of_block(largest_magnitude<T>(raw), smem.largest);
  BlockScale const scale = block_scale(__uint_as_float(largest), format, kind);
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    codes[i] = encode_eight<format>(unpack_raw<T>(raw[i]), scale.to_code);
  }
  return scale.to_value;
}

// The patch's codes from codes with a scale a row, of column `scale_column`; returns the scale.
template <bool aligned, Float8 format>
__device__ float encode_codes(ChunkArgs const& x, int const (&row)[kPatch], int column, int columns,
                              int scale_column, ChunkStorage& smem, PatchCodes& codes) {
  float scale[kPatch];
  uint8_t const* const from = static_cast<uint8_t const*>(x.x) + column + patch_column();
  int const count = columns - patch_column();
  uint32_t largest = magnitude(block_scale(0, format, ScaleKind::power_of_two).to_value);
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    codes[i] = {0, 0};
    scale[i] = 0;
    if (row[i] < 0) continue;
    scale[i] = x.x_scales[row[i] * x.x_scale_row_stride + scale_column * x.x_scale_column_stride];
    uint8_t const* const codes_of_row = from + row[i] * x.x_stride;
    if (aligned) {
      if (count > 0) codes[i] = *reinterpret_cast<uint2 const*>(codes_of_row);
    } else {
      uint64_t all = 0;
      for (int j = 0; j < min(count, 8); ++j) all |= uint64_t(codes_of_row[j]) << 8 * j;
      codes[i] = {uint32_t(all), uint32_t(all >> 32)};
    }
  }
#pragma unroll
  for (float const value : scale) largest = max(largest, magnitude(value));
  float const of_block = __uint_as_float(largest_of_block(largest, smem.largest));
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    if (row[i] < 0) continue;
    float const quotient = scale[i] / of_block;
    auto const shift = [&](uint32_t four) {
      float4 const v = decode_four<format>(four);
      return encode_four<format>(v.x * quotient, v.y * quotient, v.z * quotient, v.w * quotient);
    };
    codes[i] = {shift(codes[i].x), shift(codes[i].y)};
  }
  return of_block;
}

// Encodes(row, column, columns, block, smem, codes) gives the patch's codes and their scale.
template <class Encode>
__device__ void quantize_chunk(ChunkArgs const& x, Encode&& encode) {
  __shared__ ChunkStorage smem;
  int const across = x.halves * x.blocks, block = blockIdx.x % across, slot = blockIdx.x / across;
  find_chunk(x.groups, slot, smem);
  if (smem.count == 0) return;
  int row[kPatch];
  find_rows(x, smem.first, smem.count, row);
  int const first = block % x.blocks * int(kScaleBlock), half = block / x.blocks;
  int const columns = min(x.columns - first, int(kScaleBlock));
  int64_t const column = half * x.columns + first;
  PatchCodes codes;
  float const scale = encode(row, int(column), columns, block, smem, codes);
  if (threadIdx.x == 0) {
    x.scales[slot * x.scale_slot_stride + block * x.scale_column_stride] = scale;
  }
  smem.tile.put(codes);
  __syncthreads();
  int64_t const width = int64_t(x.halves) * x.columns;
  CodeRows const to{x.codes + (slot * width + column) * kScaleBlock, kScaleBlock, true};
  store_turned(smem.tile, to, int(kScaleBlock), columns);
}

template <class T, Steps steps, Float8 format>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 2 ? 4 : 2) elements_kernel(
    ChunkArgs const x, ScaleKind const kind) {
  quantize_chunk(
      x, [&](auto const& row, int column, int columns, int, ChunkStorage& smem, PatchCodes& codes) {
        return encode_elements<T, steps, format>(x, kind, row, column, columns, smem, codes);
      });
}

template <bool aligned, Float8 format>
__global__ void __launch_bounds__(kTileThreads, 4) codes_kernel(ChunkArgs const x) {
  quantize_chunk(x, [&](auto const& row, int column, int columns, int block, ChunkStorage& smem,
                        PatchCodes& codes) {
    return encode_codes<aligned, format>(x, row, column, columns, block, smem, codes);
  });
}

void launch(QuantizeChunks const& x, ChunkArgs const& args, Queue const& queue) {
  int64_t const blocks = chunk_slots(x.rows, x.groups) * args.halves * int64_t(args.blocks);
  require(blocks <= (int64_t(1) << 31) - 1,
          "rows: expected fewer than 2^31 blocks of 128 x 128, got ", blocks);
  unsigned const grid = unsigned(blocks);
  auto const address = reinterpret_cast<uintptr_t>(x.x.data);
  with_format(x.format, [&](auto format) {
    if (x.x_scales.data != nullptr) {
      bool const aligned = address % 8 == 0 && args.x_stride % 8 == 0 && args.columns % 8 == 0;
      auto const kernel =
          aligned ? codes_kernel<true, format.value> : codes_kernel<false, format.value>;
      kernel<<<grid, kTileThreads, 0, queue.stream>>>(args);
      return;
    }
    with_element(x.dtype, [&](auto element) {
      using T = decltype(element);
      int const unit = 16 / sizeof(T);
      bool const aligned = address % 16 == 0 && args.x_stride % unit == 0 && args.columns % 8 == 0;
      auto const kernel = aligned ? elements_kernel<T, Steps::next, format.value>
                                  : elements_kernel<T, Steps::any, format.value>;
      kernel<<<grid, kTileThreads, 0, queue.stream>>>(args, x.scale);
    });
  });
  cuda_check(cudaGetLastError(), "launch of quantize_chunks");
}

}  // namespace

void quantize_chunks(QuantizeChunks const& x, Queue queue) {
  check(x);
  require(reinterpret_cast<uintptr_t>(x.codes) % 16 == 0,
          "codes: expected 16-byte aligned data on CUDA, got address ", x.codes);
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
