// quantize_chunks(): a thread block for each 128 columns of a slot, or 256 of codes.
#include "check_float8_chunks.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/float8/chunk_places.cuh"
#include "cuda/float8/tile.cuh"

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
  store_turned(smem.tile, {x.place(slot, column), kScaleBlock, true, true}, int(kScaleBlock),
               columns);
}

// ---- of codes
// ------------------------------------------------------------------------------------

// A thread has 16 columns of eight rows. Its half of the 256 columns has a scale of its own. Blocks
// go through all chunks before they go on to other columns: rows that are gathered several times
// are still in L2 then, since what is written does not stay there.
constexpr int kWide = 2 * int(kScaleBlock);

struct CodeStorage {
  TurnedTile<kWide> tile;
  int row[kScaleBlock];         // in x; -1: zeros
  float scale[2][kScaleBlock];  // of each row
  uint32_t largest[kTileThreads / 32];
  ChunkRows rows;
};

template <bool aligned>
__device__ uint4 load_codes(uint8_t const* from, int count) {
  if (count <= 0) return {};
  if constexpr (aligned) return *reinterpret_cast<uint4 const*>(from);
  uint32_t word[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < count) word[i / 4] |= uint32_t(from[i]) << 8 * (i % 4);
  }
  return {word[0], word[1], word[2], word[3]};
}

// The largest scale of each half of the columns: that of a block of zeros, at least. Thread t has
// the scale of row t % 128 in half t / 128.
template <Float8 format>
__device__ float largest_scale(float own, CodeStorage& smem, int half) {
  uint32_t const least = magnitude(block_scale(0, format, ScaleKind::power_of_two).to_value);
  uint32_t largest = __reduce_max_sync(~0u, max(magnitude(own), least));
  if (threadIdx.x % 32 == 0) smem.largest[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTileThreads / 64; ++i) {
    largest = i == 0 ? smem.largest[half * 4] : max(largest, smem.largest[half * 4 + i]);
  }
  return __uint_as_float(largest);
}

template <bool aligned, Float8 format>
__global__ void __launch_bounds__(kTileThreads, 4) codes_kernel(ChunkArgs const x) {
  __shared__ CodeStorage smem;
  int const pairs = (x.blocks + 1) / 2, pair = blockIdx.y, slot = blockIdx.x;
  find_chunk(x.groups, slot, smem.rows);
  if (smem.rows.count == 0) return;
  int const first = pair % pairs * kWide, half = pair / pairs;
  int const columns = min(x.columns - first, kWide), column = half * x.columns + first;
  int const own_row = threadIdx.x % int(kScaleBlock), own_half = threadIdx.x / int(kScaleBlock);
  int const source = source_row(smem.rows, own_row, x.row_token, x.tokens);
  if (own_half == 0) smem.row[own_row] = source;
  __syncthreads();
  int const own_column = int(threadIdx.x) % 16 * 16;
  uint8_t const* const from = static_cast<uint8_t const*>(x.x) + column + own_column;
  uint4 codes[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    int const row = smem.row[patch_row() + i];
    codes[i] = load_codes<aligned>(from + row * x.x_stride, row >= 0 ? columns - own_column : 0);
  }
  int const block = half * x.blocks + pair % pairs * 2;  // the first of two
  float scale = 0;
  if (source >= 0 && own_half * int(kScaleBlock) < columns) {
    scale =
        x.x_scales[source * x.x_scale_row_stride + (block + own_half) * x.x_scale_column_stride];
  }
  smem.scale[own_half][own_row] = scale;
  int const side = own_column / int(kScaleBlock);
  float const of_block = largest_scale<format>(scale, smem, side);
  if (threadIdx.x % 16 % 8 == 0 && patch_row() == 0 && own_column < columns) {
    x.scales[slot * x.scale_slot_stride + (block + side) * x.scale_column_stride] = of_block;
  }
  PatchCodes left, right;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    float const quotient = smem.scale[side][patch_row() + i] / of_block;
    bool const exists = smem.row[patch_row() + i] >= 0;
    auto const shift = [&](uint32_t four) {
      float4 const v = decode_four<format>(four);
      return exists ? encode_four<format>(v.x * quotient, v.y * quotient, v.z * quotient,
                                          v.w * quotient)
                    : 0;
    };
    left[i] = {shift(codes[i].x), shift(codes[i].y)};
    right[i] = {shift(codes[i].z), shift(codes[i].w)};
  }
  smem.tile.put(own_column, left);
  smem.tile.put(own_column + 8, right);
  __syncthreads();
  store_turned(smem.tile, {x.place(slot, column), kScaleBlock, true, true}, int(kScaleBlock),
               columns);
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
      int64_t const across = x.halves * ((args.blocks + 1) / 2);
      require(across <= 65535, "columns: expected at most 65,535 times 256 of codes on CUDA, got ",
              x.halves * x.columns);
      dim3 const grid(grid_of(x, 1), unsigned(across));
      kernel<<<grid, kTileThreads, 0, queue.stream>>>(args);
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
