// quantize_rows(): 1 x 128 blocks, 16 threads each, eight elements per thread.
#include "checks/check.h"
#include "cuda/device.h"
#include "cuda/float8/tile.cuh"
#include "shared/ceil_div.h"
#include "shared/row_stride.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256, kOfBlock = int(kScaleBlock) / 8;  // threads of a block of scales
// Blocks per thread: enough loads in flight to saturate memory.
constexpr int kAtOnce = 4;

struct RowArgs {
  void const* x;
  uint8_t* codes;
  float* scales;
  int64_t x_stride, codes_stride, scale_row_stride, scale_column_stride;
  int64_t count;    // of blocks
  unsigned blocks;  // of a row
  int columns;
  bool aligned_codes;  // rows of codes begin on 8-byte boundaries
};

// Stores a thread's eight codes, of which `count` exist.
__device__ void store_codes(uint8_t* to, uint2 codes, int count, bool aligned) {
  if (aligned && count >= 8) {
    *reinterpret_cast<uint2*>(to) = codes;
  } else {
    store_bytes(to, codes, min(count, 8));
  }
}

template <class T, Steps steps, Float8 format>
__global__ void __launch_bounds__(kThreads) rows_kernel(RowArgs const x, ScaleKind const kind) {
  int const column = threadIdx.x % kOfBlock * 8;
  int64_t const first =
      int64_t(blockIdx.x) * (kThreads / kOfBlock * kAtOnce) + threadIdx.x / kOfBlock;
  Raw<T> raw[kAtOnce];
  int64_t row[kAtOnce];
  int block[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    int64_t const index = min(first + i * (kThreads / kOfBlock), x.count - 1);
    row[i] = index < 1ll << 32 ? unsigned(index) / x.blocks : index / x.blocks;
    block[i] = int(index - row[i] * x.blocks);
    int const at = block[i] * int(kScaleBlock) + column;
    T const* const from = static_cast<T const*>(x.x) + row[i] * x.x_stride + at;
    raw[i] = load_raw<T, steps>(from, 1, x.columns - at, false);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    Eight const e = unpack_raw<T>(raw[i]);
    uint32_t largest = 0;
#pragma unroll
    for (float const value : e.value) largest = max(largest, magnitude(value));
#pragma unroll
    for (int lanes = kOfBlock / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    if (first + i * (kThreads / kOfBlock) >= x.count) continue;
    BlockScale const scale = block_scale(__uint_as_float(largest), format, kind);
    if (column == 0) {
      x.scales[row[i] * x.scale_row_stride + block[i] * x.scale_column_stride] = scale.to_value;
    }
    int const at = block[i] * int(kScaleBlock) + column;
    store_codes(x.codes + row[i] * x.codes_stride + at, encode_eight<format>(e, scale.to_code),
                x.columns - at, x.aligned_codes);
  }
}

}  // namespace

void quantize_rows(QuantizeRows const& x, Queue queue) {
  check(x);
  if (x.rows == 0) return;
  int64_t const blocks = ceil_div(x.columns, kScaleBlock);
  int64_t const codes_stride = row_stride(x.codes, x.columns);
  RowArgs const args{
      .x = x.x.data,
      .codes = static_cast<uint8_t*>(x.codes.data),
      .scales = x.scales.data,
      .x_stride = row_stride(x.x, x.columns),
      .codes_stride = codes_stride,
      .scale_row_stride = x.scales.row_stride,
      .scale_column_stride = x.scales.col_stride,
      .count = x.rows * blocks,
      .blocks = unsigned(blocks),
      .columns = int(x.columns),
      .aligned_codes = reinterpret_cast<uintptr_t>(x.codes.data) % 8 == 0 && codes_stride % 8 == 0};
  int64_t const grid = ceil_div(args.count, kThreads / kOfBlock * kAtOnce);
  require(grid <= (int64_t(1) << 31) - 1, "rows: expected fewer than 2^37 blocks of 128, got ",
          args.count);
  int const unit = x.dtype == DType::float32 ? 4 : 8;
  bool const aligned = reinterpret_cast<uintptr_t>(x.x.data) % 16 == 0 &&
                       args.x_stride % unit == 0 && x.columns % 8 == 0;
  with_element(x.dtype, [&](auto element) {
    using T = decltype(element);
    with_format(x.format, [&](auto format) {
      auto const kernel = aligned ? rows_kernel<T, Steps::next, format.value>
                                  : rows_kernel<T, Steps::any, format.value>;
      kernel<<<unsigned(grid), kThreads, 0, queue.stream>>>(args, x.scale);
    });
  });
  cuda_check(cudaGetLastError(), "launch of quantize_rows");
}

}  // namespace guild::cuda
