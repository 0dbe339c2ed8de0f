// Quantisation by blocks: a warp for each 1x128 block of a row, a thread block for each 128x128
// block of a weight, which it keeps in registers between the two passes, so that memory is read
// once.
#include <cuda_fp8.h>

#include <algorithm>

#include "check.h"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "cuda/warp.cuh"
#include "shared/float8.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ uint8_t encode(float x, Float8 format) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, format == Float8::e4m3 ? __NV_E4M3 : __NV_E5M2);
}

// The larger of two absolute values; NaN and infinity above all others.
__device__ float larger(float largest, float x) {
  float const size = fabsf(x);
  return size <= largest || isnan(largest) ? largest : size;
}
__device__ float largest_of_warp(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = larger(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// A lane's columns of a block are lane, lane + 32, lane + 64 and lane + 96: neighbouring lanes read
// neighbouring elements, whatever the alignment.
constexpr int kOfLane = kScaleBlock / 32;

template <class T>
__global__ void __launch_bounds__(kThreads) rows_kernel(QuantizeRows x, int64_t x_stride,
                                                        int64_t codes_stride, int64_t blocks) {
  int const lane = threadIdx.x % 32;
  int64_t const count = x.rows * blocks;
  for (int64_t i = blockIdx.x * int64_t(kWarps) + threadIdx.x / 32; i < count;
       i += int64_t(gridDim.x) * kWarps) {
    int64_t const row = i / blocks, block = i % blocks, first = block * kScaleBlock;
    T const* const from = static_cast<T const*>(x.x.data) + row * x_stride + first;
    float value[kOfLane], largest = 0;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      int const c = lane + 32 * j;
      value[j] = first + c < x.columns ? to_float(from[c]) : 0.f;
      largest = larger(largest, value[j]);
    }
    BlockScale const scale = block_scale(largest_of_warp(largest), x.format, x.scale);
    if (lane == 0) {
      x.scales.data[row * x.scales.row_stride + block * x.scales.col_stride] = scale.to_value;
    }
    uint8_t* const to = static_cast<uint8_t*>(x.codes.data) + row * codes_stride + first;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      int const c = lane + 32 * j;
      if (first + c < x.columns) to[c] = encode(value[j] * scale.to_code, x.format);
    }
  }
}

// One thread block a 128x128 block: a thread has every second row of one column. `in` is contiguous
// in codes and scales' columns go along it.
template <class T>
__global__ void __launch_bounds__(kThreads) weights_kernel(QuantizeWeights x, int down,
                                                           int across) {
  constexpr int kOfThread = kScaleBlock * kScaleBlock / kThreads;
  __shared__ float largest_of[kWarps];
  // Odd pitch: columns of the block fall into different banks.
  __shared__ uint8_t turned[kScaleBlock][kScaleBlock + 4];
  int const block_in = blockIdx.x % across, block_out = blockIdx.x / across % down;
  int64_t const expert = blockIdx.x / across / down;
  int64_t const in = block_in * kScaleBlock + threadIdx.x % kScaleBlock;
  int const part = threadIdx.x / kScaleBlock;
  constexpr int kParts = kThreads / kScaleBlock;
  T const* const from = static_cast<T const*>(x.w.data) + expert * x.w.expert_stride;
  auto const out_of = [&](int i) { return block_out * kScaleBlock + i * kParts + part; };
  float value[kOfThread], largest = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    int64_t const out = out_of(i);
    bool const inside = out < x.out && in < x.in;
    value[i] = inside ? to_float(from[out * x.w.out_stride + in * x.w.in_stride]) : 0.f;
    largest = larger(largest, value[i]);
  }
  largest = largest_of_warp(largest);
  if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = larger(largest, largest_of[w]);
  BlockScale const scale = block_scale(largest, x.format, x.scale);
  if (threadIdx.x == 0) {
    x.scales.data[expert * x.scales.expert_stride + block_out * x.scales.row_stride +
                  block_in * x.scales.col_stride] = scale.to_value;
  }
  uint8_t* const codes = static_cast<uint8_t*>(x.codes.data) + expert * x.codes.expert_stride;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    int64_t const out = out_of(i);
    uint8_t const code = encode(value[i] * scale.to_code, x.format);
    if (out < x.out && in < x.in) codes[out * x.codes.out_stride + in * x.codes.in_stride] = code;
    turned[i * kParts + part][threadIdx.x % kScaleBlock] = code;
  }
  if (x.transposed.data == nullptr) return;
  __syncthreads();
  uint8_t* const to =
      static_cast<uint8_t*>(x.transposed.data) + expert * x.transposed.expert_stride;
  int64_t const out = int64_t(block_out) * kScaleBlock + threadIdx.x % kScaleBlock;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    int64_t const column = int64_t(block_in) * kScaleBlock + i * kParts + part;
    if (out < x.out && column < x.in) {
      to[out * x.transposed.out_stride + column * x.transposed.in_stride] =
          turned[threadIdx.x % kScaleBlock][i * kParts + part];
    }
  }
}

// Calls f with an element of x's type.
template <class F>
void with_element(DType dtype, F&& f) {
  if (dtype == DType::float32) {
    f(float());
  } else {
    with_type(dtype, f);
  }
}

int64_t blocks_of(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

}  // namespace

void quantize_rows(QuantizeRows const& x, Queue queue) {
  check(x);
  if (x.rows == 0) return;
  int64_t const blocks = blocks_of(x.columns);
  int64_t const most = int64_t(multiprocessors(queue)) * 16;
  unsigned const grid = unsigned(std::min(most, (x.rows * blocks + kWarps - 1) / kWarps));
  with_element(x.dtype, [&](auto element) {
    rows_kernel<decltype(element)><<<grid, kThreads, 0, queue.stream>>>(
        x, x.x.stride == 0 ? x.columns : x.x.stride,
        x.codes.stride == 0 ? x.columns : x.codes.stride, blocks);
  });
  cuda_check(cudaGetLastError(), "launch of quantize_rows");
}

void quantize_weights(QuantizeWeights const& x, Queue queue) {
  check(x);
  int64_t const down = blocks_of(x.out), across = blocks_of(x.in);
  int64_t const count = x.experts * down * across;
  require(count <= (int64_t(1) << 31) - 1, "experts: expected fewer than 2^31 blocks, got ", count);
  with_element(x.dtype, [&](auto element) {
    weights_kernel<decltype(element)>
        <<<unsigned(count), kThreads, 0, queue.stream>>>(x, int(down), int(across));
  });
  cuda_check(cudaGetLastError(), "launch of quantize_weights");
}

}  // namespace guild::cuda
