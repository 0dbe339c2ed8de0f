// db[e] = sum over the rows r of e of row_score[r] * M[row_token[r]]: a cluster of blocks per
// expert and 256 columns, a warp at a row. Rows are dealt to the cluster's warps, and their sums
// added up in a fixed order.
//
// Columns change last from block to block: while all experts gather the same columns of dO, these
// stay in L2.
#include "alignment.h"
#include "arch/cluster.cuh"
#include "check.h"
#include "element.cuh"

namespace guild::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = 32 * 8;
constexpr int kAtOnce = 4;               // rows that a warp loads before it uses them
constexpr int kMostBlocks = 8;           // of a cluster
constexpr int64_t kEnoughBlocks = 1056;  // on the GPU: eight a multiprocessor

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

// Sum over every `step`th group of kAtOnce rows from `first` to `end`, of eight columns.
template <class T>
__device__ Eight sum_rows(BiasGradient const& x, int64_t m_stride, int col, int first, int end,
                          int step, bool aligned) {
  float const* const score = static_cast<float const*>(x.routing.row_score);
  T const* const m = static_cast<T const*>(x.m.data) + col;
  Eight sum{};
  for (; first < end; first += step) {
    Eight row[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = {};
      weight[i] = 1;
      int const r = first + i;
      if (r >= end) continue;
      int64_t const from = x.routing.row_token == nullptr ? r : x.routing.row_token[r];
      if (score != nullptr) weight[i] = score[r];
      row[i] = load_some(m + from * m_stride, x.width - col, aligned);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum.value[j] += weight[i] * row[i].value[j];
    }
  }
  return sum;
}

template <class T>
__device__ void store_gradient(BiasGradient const& x, int64_t at, float total) {
  if (x.db_dtype == DType::float32) {
    float* const to = static_cast<float*>(x.db.data) + at;
    *to = total + (x.accumulate ? *to : 0.f);
  } else {
    T* const to = static_cast<T*>(x.db.data) + at;
    *to = T(total + (x.accumulate ? float(*to) : 0.f));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) bias_gradient_kernel(BiasGradient x, int64_t m_stride,
                                                                 int64_t db_stride, int blocks,
                                                                 bool aligned) {
  __shared__ float part[kWarps][kColumns], block_sum[kColumns];
  int const rank = cluster_rank(), warp = threadIdx.x / 32, local = threadIdx.x % 32 * 8;
  int64_t const piece = blockIdx.x / blocks;
  int const expert = int(piece % x.experts), begin_col = int(piece / x.experts) * kColumns;
  int const begin = max(x.routing.offsets[expert], 0);
  int const end = min(x.routing.offsets[expert + 1], int(x.rows));
  int const first = begin + (rank * kWarps + warp) * kAtOnce, step = blocks * kWarps * kAtOnce;
  Eight sum{};
  if (begin_col + local < x.width) {
    sum = sum_rows<T>(x, m_stride, begin_col + local, first, end, step, aligned);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) part[warp][local + i] = sum.value[i];
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += part[w][threadIdx.x];
  block_sum[threadIdx.x] = total;
  cluster_barrier();
  int const mine = kColumns / blocks, column = rank * mine + int(threadIdx.x);
  if (int(threadIdx.x) < mine && begin_col + column < x.width) {
    total = 0;
    for (int b = 0; b < blocks; ++b) total += load_from_block(&block_sum[column], b);
    store_gradient<T>(x, expert * db_stride + begin_col + column, total);
  }
  cluster_barrier();  // the other blocks have read `block_sum`
}

// Blocks of a cluster: more where there are few pieces of work, as long as each finds rows.
int cluster_of(BiasGradient const& x, int64_t pieces) {
  int blocks = 1;
  while (blocks < kMostBlocks && pieces * blocks < kEnoughBlocks &&
         x.experts * blocks * kWarps * kAtOnce < x.rows) {
    blocks *= 2;
  }
  return blocks;
}

}  // namespace

void bias_gradient(BiasGradient const& x, Queue queue) {
  check(x);
  require_16_bit(x.dtype);
  int64_t const stride = row_stride(x.m, x.width);
  bool const aligned =
      x.width % 8 == 0 && stride % 8 == 0 && reinterpret_cast<uintptr_t>(x.m.data) % 16 == 0;
  int64_t const pieces = (x.width + kColumns - 1) / kColumns * x.experts;
  int const blocks = cluster_of(x, pieces);
  cudaLaunchAttribute shape{};
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim = {unsigned(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(pieces * blocks));
  config.blockDim = dim3(kThreads);
  config.stream = queue.stream;
  config.attrs = &shape;
  config.numAttrs = 1;
  with_type(x.dtype, [&](auto element) {
    cuda_check(cudaLaunchKernelEx(&config, bias_gradient_kernel<decltype(element)>, x, stride,
                                  row_stride(x.db, x.width), blocks, aligned),
               "launch of bias_gradient");
  });
}

}  // namespace guild::cuda
