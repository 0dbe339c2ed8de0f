// quantize_chunks(): one thread block per slot and 128 columns, or 256 columns if x is codes.
//
// Results are streamed past L2. Where x is codes, or a gather reads rows several times, blocks go
// through all chunks of some columns before they move to others, so that re-read rows are still in
// L2.
#include "checks/float8_chunks.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/float8/chunk_places.cuh"
#include "cuda/float8/rescale.cuh"
#include "cuda/float8/tile.cuh"
#include "shared/gpu.h"

namespace guild::cuda {
namespace {

// ---- of elements --------------------------------------------------------------------------------

struct ElementStorage {
  TurnedTile<kScaleBlock> tile;
  uint32_t largest[kTileThreads / 32];
  ChunkRows rows;
};

template <class T, Steps steps, Float8 format>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 2 ? 4 : 2) elements_kernel(
    ChunkArgs const x, ScaleKind const kind) {
  __shared__ ElementStorage smem;
  int const across = x.halves * x.blocks, slots = gridDim.x / across, number = blockIdx.x;
  bool const again = x.row_token != nullptr && x.groups.total > x.tokens;
  int const block = again ? number / slots : number % across;
  int const slot = again ? number % slots : number / across;
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
  uint32_t const largest = largest_of_threads(largest_magnitude<T>(raw), smem.largest);
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

// ---- of codes -----------------------------------------------------------------------------------

// A thread has 16 columns of eight rows; each half of the 256 columns has its own scale.
constexpr int kWide = 2 * int(kScaleBlock);

struct CodeStorage {
  TurnedTile<kWide> tile;
  int64_t row[kScaleBlock];        // where it begins in x; -1: zeros
  float quotient[2][kScaleBlock];  // of each row's scale and the largest one, in both halves
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

// The largest scale of 128 rows in one half of the columns, at least that of a block of zeros.
// Thread t contributes row t % 128 of half t / 128; after a barrier all threads may read the
// result.
template <Float8 format>
__device__ void tell_scale(float own, CodeStorage& smem) {
  uint32_t const least = magnitude(block_scale(0, format, ScaleKind::power_of_two).to_value);
  uint32_t const largest = __reduce_max_sync(~0u, max(magnitude(own), least));
  if (threadIdx.x % 32 == 0) smem.largest[threadIdx.x / 32] = largest;
}
__device__ float largest_scale(CodeStorage const& smem, int half) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kTileThreads / 64; ++i) largest = max(largest, smem.largest[half * 4 + i]);
  return __uint_as_float(largest);
}

// Multiplies rows of codes by quotients of scales, of at most 1, and rounds them again.
template <Float8 format>
__device__ void rescale(uint4 (&codes)[kPatch], float const* quotient) {
  uint32_t mantissas = 0;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) mantissas |= __float_as_uint(quotient[i]) & 0x7fffff;
  if (format == Float8::e4m3 && mantissas == 0) {  // powers of two, or zero
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      uint32_t const f = half_factor(quotient[i]);
      uint4 const c = codes[i];
      codes[i] = {scale_e4m3(c.x, f), scale_e4m3(c.y, f), scale_e4m3(c.z, f), scale_e4m3(c.w, f)};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    float const q = quotient[i];
    uint4 const c = codes[i];
    codes[i] = {rescale_four<format>(c.x, q), rescale_four<format>(c.y, q),
                rescale_four<format>(c.z, q), rescale_four<format>(c.w, q)};
  }
}

template <bool aligned, Float8 format>
__global__ void __launch_bounds__(kTileThreads, 4) codes_kernel(ChunkArgs const x) {
  __shared__ CodeStorage smem;
  int const pairs = (x.blocks + 1) / 2, pair = blockIdx.y, slot = blockIdx.x;
  find_chunk(x.groups, slot, smem.rows);
  if (smem.rows.count == 0) return;
  int const first = pair % pairs * kWide, half = pair / pairs;
  int const columns = min(x.columns - first, kWide), column = half * x.columns + first;
  int const own_row = int(threadIdx.x % 128u), own_half = int(threadIdx.x / 128u);
  int const source = source_row(smem.rows, own_row, x.row_token, x.tokens);
  if (own_half == 0) smem.row[own_row] = source < 0 ? -1 : source * x.x_stride;
  __syncthreads();
  int const own_column = int(threadIdx.x % 16u) * 16;
  uint8_t const* const from = static_cast<uint8_t const*>(x.x) + column + own_column;
  uint4 codes[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    int64_t const row = smem.row[patch_row() + i];
    codes[i] = load_codes<aligned>(from + row, row >= 0 ? columns - own_column : 0);
  }
  int const block = half * x.blocks + pair % pairs * 2;  // the first of two
  float scale = 0;
  if (source >= 0 && own_half * int(kScaleBlock) < columns) {
    scale =
        x.x_scales[source * x.x_scale_row_stride + (block + own_half) * x.x_scale_column_stride];
  }
  tell_scale<format>(scale, smem);
  __syncthreads();
  // Rows that do not exist are zeros, whatever the largest scale.
  smem.quotient[own_half][own_row] = source < 0 ? 0 : scale / largest_scale(smem, own_half);
  int const side = own_column / int(kScaleBlock);
  if (threadIdx.x % 16 % 8 == 0 && patch_row() == 0 && own_column < columns) {
    x.scales[slot * x.scale_slot_stride + (block + side) * x.scale_column_stride] =
        largest_scale(smem, side);
  }
  __syncthreads();
  rescale<format>(codes, &smem.quotient[side][patch_row()]);
  PatchCodes left, right;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    left[i] = {codes[i].x, codes[i].y};
    right[i] = {codes[i].z, codes[i].w};
  }
  smem.tile.put(own_column, left);
  smem.tile.put(own_column + 8, right);
  __syncthreads();
  store_turned(smem.tile, {x.place(slot, column), kScaleBlock, true, true}, int(kScaleBlock),
               columns);
}

// ---- launch -------------------------------------------------------------------------------------

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
      require(across <= kMostBlocksAlongY,
              "columns: expected at most 65,535 x 256 columns of codes on CUDA, got ",
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
