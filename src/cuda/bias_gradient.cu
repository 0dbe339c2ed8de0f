// db[e] = sum over the rows r of e of row_score[r] * M[row_token[r]]: one block per expert and 64
// columns, rows dealt to 32 lanes of threads and their sums added in a fixed order.
#include "alignment.h"
#include "check.h"
#include "element.cuh"

namespace guild::cuda {
namespace {

constexpr int kColumns = 64, kLanes = 32, kThreads = kColumns / 8 * kLanes;

// Eight elements of a row, the last `left` of it; in one load where rows lie on 16 bytes.
template <class T>
__device__ Eight load_some(T const* from, int64_t left, bool aligned) {
  if (aligned) return load_eight(from);
  Eight e{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < left) e.value[i] = float(from[i]);
  }
  return e;
}

template <class T>
__global__ void bias_gradient_kernel(BiasGradient x, int64_t m_stride, int64_t db_stride,
                                     bool aligned) {
  __shared__ float part[kLanes][kColumns];
  int const expert = blockIdx.y, lane = threadIdx.x / (kColumns / 8);
  int const local = threadIdx.x % (kColumns / 8) * 8, col = blockIdx.x * kColumns + local;
  int const begin = max(x.routing.offsets[expert], 0);
  int const end = min(x.routing.offsets[expert + 1], int(x.rows));
  float const* const score = static_cast<float const*>(x.routing.row_score);
  Eight sum{};
  for (int row = begin + lane; row < end && col < x.width; row += kLanes) {
    int const from = x.routing.row_token == nullptr ? row : x.routing.row_token[row];
    float const s = score == nullptr ? 1.f : score[row];
    T const* const at = static_cast<T const*>(x.m.data) + from * m_stride + col;
    Eight const v = load_some(at, x.width - col, aligned);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum.value[i] += s * v.value[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) part[lane][local + i] = sum.value[i];
  __syncthreads();
  int const column = blockIdx.x * kColumns + threadIdx.x;
  if (threadIdx.x >= kColumns || column >= x.width) return;
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += part[i][threadIdx.x];
  int64_t const at = expert * db_stride + column;
  if (x.db_dtype == DType::float32) {
    float* const to = static_cast<float*>(x.db.data) + at;
    *to = total + (x.accumulate ? *to : 0.f);
  } else {
    T* const to = static_cast<T*>(x.db.data) + at;
    *to = T(total + (x.accumulate ? float(*to) : 0.f));
  }
}

}  // namespace

void bias_gradient(BiasGradient const& x, Queue queue) {
  check(x);
  require_16_bit(x.dtype);
  bool const aligned = x.width % 8 == 0 && row_stride(x.m, x.width) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(x.m.data) % 16 == 0;
  dim3 const blocks(unsigned((x.width + kColumns - 1) / kColumns), unsigned(x.experts));
  with_type(x.dtype, [&](auto element) {
    bias_gradient_kernel<decltype(element)><<<blocks, kThreads, 0, queue.stream>>>(
        x, row_stride(x.m, x.width), x.db.stride == 0 ? x.width : x.db.stride, aligned);
  });
  cuda_check(cudaGetLastError(), "launch of bias_gradient");
}

}  // namespace guild::cuda
