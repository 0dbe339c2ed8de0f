// quantize_weights(): one thread block per 128 x 128 block, which passes through registers once
// (tile.cuh).
#include "checks/check.h"
#include "cuda/device.h"
#include "cuda/float8/tile.cuh"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

// The weight as tiles see it: rows of a tile run along the contiguous dimension, whichever it is.
// `turned` and `as_read` map the two stores to codes and transposed accordingly.
struct WeightTiles {
  void const* from[2];  // of the halves; with Steps::second the gate's both times
  int32_t const* expert_at[2];
  int64_t expert_stride[2], row_stride[2], step[2];
  int rows, columns;  // of a half
  int down, across, halves;
  bool halves_below;  // the second half's codes begin `rows` rows on; else `columns` columns on
  CodeRows as_read, turned;  // null data: not wanted
  int64_t as_read_expert_stride, turned_expert_stride;
  float* scales;
  int64_t scale_expert_stride, scale_row_stride, scale_column_stride, scale_half_stride;
};

struct WeightStorage {
  TurnedTile<kScaleBlock> tile;
  uint32_t largest[kTileThreads / 32];
};

template <class T, Steps steps, Float8 format>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 2 ? 4 : 2) weights_kernel(
    WeightTiles const x, ScaleKind const kind) {
  __shared__ WeightStorage smem;
  // Gate and up side by side: where they alternate, both read the same memory.
  int index = blockIdx.x;
  int const half = index % x.halves;
  index /= x.halves;
  int const block_column = index % x.across;
  index /= x.across;
  int const block_row = index % x.down, expert = index / x.down;
  int const first_row = block_row * kScaleBlock, first_column = block_column * kScaleBlock;
  int const rows = min(x.rows - first_row, int(kScaleBlock));
  int const columns = min(x.columns - first_column, int(kScaleBlock));
  T const* const from = static_cast<T const*>(x.from[half]) +
                        placed(x.expert_at[half], expert) * x.expert_stride[half] +
                        (first_row + patch_row()) * x.row_stride[half] +
                        (first_column + patch_column()) * x.step[half];
  Raw<T> raw[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    int const count = patch_row() + i < rows ? columns - patch_column() : 0;
    raw[i] = load_raw<T, steps>(from + i * x.row_stride[half], x.step[half], count, half == 1);
  }
  uint32_t const largest = largest_of_threads(largest_magnitude<T>(raw), smem.largest);
  BlockScale const scale = block_scale(__uint_as_float(largest), format, kind);
  if (threadIdx.x == 0) {
    x.scales[expert * x.scale_expert_stride + half * x.scale_half_stride +
             block_row * x.scale_row_stride + block_column * x.scale_column_stride] =
        scale.to_value;
  }
  PatchCodes codes;
#pragma unroll
  for (int i = 0; i < kPatch; ++i)
    codes[i] = encode_eight<format>(unpack_raw<T>(raw[i]), scale.to_code);
  int const row = first_row + (x.halves_below ? half * x.rows : 0);
  int const column = first_column + (x.halves_below ? 0 : half * x.columns);
  if (x.as_read.data != nullptr) {
    CodeRows to = x.as_read;
    to.data += expert * x.as_read_expert_stride + row * to.stride + column;
    store_patch(codes, to, rows, columns);
  }
  if (x.turned.data == nullptr) return;
  smem.tile.put(patch_column(), codes);
  __syncthreads();
  CodeRows to = x.turned;
  to.data += expert * x.turned_expert_stride + column * to.stride + row;
  store_turned(smem.tile, to, rows, columns);
}

// Codes with contiguous columns; offset: elements of a row before the second half.
CodeRows code_rows(void* data, int64_t stride, int64_t expert_stride, int64_t offset) {
  bool const aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 16 == 0 &&
                       expert_stride % 16 == 0 && offset % 16 == 0;
  return {static_cast<uint8_t*>(data), stride, aligned};
}

WeightTiles tiles_of(QuantizeWeights const& x, bool transposes) {
  WeightTiles t{};
  int64_t const halves = x.halves();
  ConstWeight const* const half[2] = {&x.w.gate, halves == 2 ? &x.w.up : &x.w.gate};
  for (int i = 0; i < 2; ++i) {
    ConstWeight const& w = *half[i];
    t.from[i] = w.data;
    t.expert_at[i] = w.expert_at;
    t.expert_stride[i] = w.expert_stride;
    t.row_stride[i] = transposes ? w.in_stride : w.out_stride;
    t.step[i] = transposes ? w.out_stride : w.in_stride;
  }
  t.halves = int(halves);
  t.halves_below = !transposes;
  t.rows = int(transposes ? x.in : x.out);
  t.columns = int(transposes ? x.out : x.in);
  t.down = int(ceil_div(t.rows, kScaleBlock));
  t.across = int(ceil_div(t.columns, kScaleBlock));
  CodeRows const codes = code_rows(x.codes.data, x.codes.out_stride, x.codes.expert_stride, 0);
  CodeRows const turned = code_rows(x.transposed.data, x.transposed.in_stride,
                                    x.transposed.expert_stride, halves == 2 ? x.out : 0);
  t.as_read = transposes ? turned : codes;
  t.turned = transposes ? codes : turned;
  t.as_read_expert_stride = transposes ? x.transposed.expert_stride : x.codes.expert_stride;
  t.turned_expert_stride = transposes ? x.codes.expert_stride : x.transposed.expert_stride;
  t.scales = x.scales.data;
  t.scale_expert_stride = x.scales.expert_stride;
  t.scale_row_stride = transposes ? x.scales.col_stride : x.scales.row_stride;
  t.scale_column_stride = transposes ? x.scales.row_stride : x.scales.col_stride;
  t.scale_half_stride = ceil_div(x.out, kScaleBlock) * x.scales.row_stride;
  return t;
}

// How the tiles can read the weight.
Steps steps_of(QuantizeWeights const& x, WeightTiles const& t) {
  int64_t const bytes = x.dtype == DType::float32 ? 4 : 2, unit = 16 / bytes;
  bool const alternate =
      x.halves() == 2 && t.step[0] == 2 && t.step[1] == 2 && t.row_stride[0] == t.row_stride[1] &&
      t.expert_stride[0] == t.expert_stride[1] && t.expert_at[0] == t.expert_at[1] &&
      static_cast<char const*>(t.from[1]) - static_cast<char const*>(t.from[0]) == bytes;
  for (int i = 0; i < 2; ++i) {
    bool const begins = alternate || reinterpret_cast<uintptr_t>(t.from[i]) % 16 == 0;
    if (!begins || t.row_stride[i] % unit != 0 || t.expert_stride[i] % unit != 0 ||
        t.columns % kPatch != 0 || (!alternate && t.step[i] != 1)) {
      return Steps::any;
    }
  }
  if (!alternate) return Steps::next;
  return reinterpret_cast<uintptr_t>(t.from[0]) % 16 == 0 ? Steps::second : Steps::any;
}

template <class T, Steps steps>
void launch(QuantizeWeights const& x, WeightTiles const& tiles, Queue const& queue) {
  int64_t const count = x.experts * tiles.halves * tiles.down * tiles.across;
  require(count <= (int64_t(1) << 31) - 1, "experts: expected fewer than 2^31 blocks, got ", count);
  with_format(x.format, [&](auto format) {
    weights_kernel<T, steps, format.value>
        <<<unsigned(count), kTileThreads, 0, queue.stream>>>(tiles, x.scale);
  });
  cuda_check(cudaGetLastError(), "launch of quantize_weights");
}

}  // namespace

void quantize_weights(QuantizeWeights const& x, Queue queue) {
  check(x);
  require(x.codes.in_stride == 1 || x.in == 1,
          "codes: expected `in` contiguous on CUDA, got stride ", x.codes.in_stride);
  require(x.transposed.data == nullptr || x.transposed.out_stride == 1 || x.halves() * x.out == 1,
          "transposed: expected `out` contiguous on CUDA, got stride ", x.transposed.out_stride);
  auto const along_out = [](ConstWeight const& w) { return w.out_stride < w.in_stride; };
  bool const transposes = along_out(x.w.gate);
  WeightTiles tiles = tiles_of(x, transposes);
  Steps const steps = steps_of(x, tiles);
  if (steps == Steps::second) tiles.from[1] = tiles.from[0];
  with_element(x.dtype, [&](auto element) {
    using T = decltype(element);
    if (steps == Steps::next) {
      launch<T, Steps::next>(x, tiles, queue);
    } else if (steps == Steps::second) {
      launch<T, Steps::second>(x, tiles, queue);
    } else {
      launch<T, Steps::any>(x, tiles, queue);
    }
  });
}

}  // namespace guild::cuda
