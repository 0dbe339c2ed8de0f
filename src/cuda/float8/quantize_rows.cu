// quantize_rows(): 1 x 128 blocks, each by the threads that hold its 128 elements, eight a thread.
#include <algorithm>

#include "check.h"
#include "cuda/device.h"
#include "cuda/float8/tile.cuh"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256, kOfBlock = int(kScaleBlock) / 8;  // threads of a block of scales
// Blocks that a thread works on at once: enough loads in flight to keep memory busy.
template <class T>
constexpr int kAtOnce = sizeof(T) == 2 ? 8 : 4;

struct RowArgs {
  void const* x;
  uint8_t* codes;
  float* scales;
  int64_t x_stride, codes_stride, scale_row_stride, scale_column_stride;
  int64_t count;    // of blocks
  unsigned blocks;  // of a row
  int columns;
  bool aligned_codes;  // rows of codes begin on 8-byte boundaries
  bool packed;         // rows follow each other, in whole blocks: block i begins at element 128 i
  bool packed_scales;  // and its scale is scale i
};

// The row of a block, and which of the row's it is.
struct RowBlock {
  int64_t row;
  int block;

  __device__ RowBlock(RowArgs const& x, int64_t index)
      : row(index < 1ll << 32 ? unsigned(index) / x.blocks : index / x.blocks),
        block(int(index - row * x.blocks)) {}
};

// Stores a thread's eight codes, of which `count` exist.
__device__ void store_codes(uint8_t* to, uint2 codes, int count, bool aligned) {
  if (aligned && count >= 8) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
  uint64_t const all = uint64_t(codes.y) << 32 | codes.x;
  for (int i = 0; i < min(count, 8); ++i) to[i] = uint8_t(all >> 8 * i);
}

template <class T, Steps steps, Float8 format>
__global__ void __launch_bounds__(kThreads, 4) rows_kernel(RowArgs const x, ScaleKind const kind) {
  constexpr int at_once = kAtOnce<T>, stride = kThreads / kOfBlock;
  int const own = threadIdx.x % kOfBlock * 8;
  int64_t const first = int64_t(blockIdx.x) * (stride * at_once) + threadIdx.x / kOfBlock;
  // Where a thread's eight elements of block i begin, and how many of a row are left there.
  auto const place = [&](int64_t index, int64_t row_stride, int& left) {
    if (x.packed) {
      left = 8;
      return index * kScaleBlock + own;
    }
    RowBlock const at(x, index);
    int const column = at.block * int(kScaleBlock) + own;
    left = x.columns - column;
    return at.row * row_stride + column;
  };
  Raw<T> raw[at_once];
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
    int left = 0;
    int64_t const at = place(min(first + i * stride, x.count - 1), x.x_stride, left);
    raw[i] = load_raw<T, steps>(static_cast<T const*>(x.x) + at, 1, left, false);
  }
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
    uint32_t largest = largest_magnitude<T>(raw[i]);
#pragma unroll
    for (int lanes = kOfBlock / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    int64_t const index = first + i * stride;
    if (index >= x.count) continue;
    BlockScale const scale = block_scale(__uint_as_float(largest), format, kind);
    if (own == 0) {
      int64_t at = index;
      if (!x.packed_scales) {
        RowBlock const block(x, index);
        at = block.row * x.scale_row_stride + block.block * x.scale_column_stride;
      }
      x.scales[at] = scale.to_value;
    }
    int left = 0;
    int64_t const at = place(index, x.codes_stride, left);
    store_codes(x.codes + at, encode_eight<format>(unpack_raw<T>(raw[i]), scale.to_code), left,
                x.aligned_codes);
  }
}

}  // namespace

void quantize_rows(QuantizeRows const& x, Queue queue) {
  check(x);
  if (x.rows == 0) return;
  int64_t const blocks = ceil_div(x.columns, kScaleBlock);
  int64_t const x_stride = x.x.stride == 0 ? x.columns : x.x.stride;
  int64_t const codes_stride = x.codes.stride == 0 ? x.columns : x.codes.stride;
  RowArgs const args{
      .x = x.x.data,
      .codes = static_cast<uint8_t*>(x.codes.data),
      .scales = x.scales.data,
      .x_stride = x_stride,
      .codes_stride = codes_stride,
      .scale_row_stride = x.scales.row_stride,
      .scale_column_stride = x.scales.col_stride,
      .count = x.rows * blocks,
      .blocks = unsigned(blocks),
      .columns = int(x.columns),
      .aligned_codes = reinterpret_cast<uintptr_t>(x.codes.data) % 8 == 0 && codes_stride % 8 == 0,
      .packed = x.columns % kScaleBlock == 0 && x_stride == x.columns && codes_stride == x.columns,
      .packed_scales = x.scales.row_stride == blocks && x.scales.col_stride == 1};
  int const unit = x.dtype == DType::float32 ? 4 : 8;
  bool const aligned = reinterpret_cast<uintptr_t>(x.x.data) % 16 == 0 &&
                       args.x_stride % unit == 0 && x.columns % 8 == 0;
  with_element(x.dtype, [&](auto element) {
    using T = decltype(element);
    int64_t const grid = ceil_div(args.count, kThreads / kOfBlock * kAtOnce<T>);
    require(grid <= (int64_t(1) << 31) - 1, "rows: expected fewer than 2^37 blocks of 128, got ",
            args.count);
    with_format(x.format, [&](auto format) {
      auto const kernel = aligned ? rows_kernel<T, Steps::next, format.value>
                                  : rows_kernel<T, Steps::any, format.value>;
      kernel<<<unsigned(grid), kThreads, 0, queue.stream>>>(args, x.scale);
    });
  });
  cuda_check(cudaGetLastError(), "launch of quantize_rows");
}

}  // namespace guild::cuda
