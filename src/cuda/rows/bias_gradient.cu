// db[e] = sum over the rows r of e of row_score[r] * M[row_token[r]]: one cluster per expert and
// 256 columns. The cluster's warps share the rows, four at a time each, and their sums are added in
// a fixed order.
//
// Consecutive clusters take the same columns of consecutive experts: while all experts gather these
// columns of dO, they stay in L2.
#include "checks/check.h"
#include "cuda/alignment.h"
#include "cuda/arch/cluster.cuh"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "shared/ceil_div.h"

namespace guild::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = 32 * 8;
constexpr int kAtOnce = 4;  // rows that a warp loads before it uses them
constexpr int kMostBlocks = kMostClusterBlocks;
constexpr int64_t kEnoughBlocks = 1056;  // in all: eight per multiprocessor

// The row of M to add for row r; -1: none.
__device__ int row_of(BiasGradient const& x, int r) {
  if (x.routing.row_token == nullptr) return r;
  int const token = x.routing.row_token[r];
  return unsigned(token) < unsigned(x.tokens) ? token : -1;
}
__device__ float weight_of(BiasGradient const& x, int r) {
  float const* const score = static_cast<float const*>(x.routing.row_score);
  return score == nullptr ? 1.f : score[r];
}

// sum += weight * the first `count` elements of `from`
template <class T>
__device__ void add_some(Eight& sum, float weight, T const* from, int64_t count) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) sum.value[i] += weight * float(from[i]);
  }
}

// Sums eight columns over every `step`-th group of kAtOnce rows from `first` to `end`. aligned: the
// columns lie on 16-byte boundaries.
template <class T>
__device__ Eight sum_rows(BiasGradient const& x, int64_t m_stride, int64_t col, int first, int end,
                          int step, bool aligned) {
  T const* const m = static_cast<T const*>(x.m.data) + col;
  Eight sum{};
  for (; aligned && first + kAtOnce <= end; first += step) {
    int64_t row[kAtOnce];
    float weight[kAtOnce];
    uint4 words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) row[i] = row_of(x, first + i);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) weight[i] = weight_of(x, first + i);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      words[i] = row[i] >= 0 ? load_words(m + row[i] * m_stride) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      Eight const v = unpack_eight<T>(words[i]);
      float const factor = row[i] >= 0 ? weight[i] : 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum.value[j] += factor * v.value[j];
    }
  }
  for (; first < end; first += step) {  // the last group, or all of them
#pragma unroll 1
    for (int r = first; r < min(first + kAtOnce, end); ++r) {
      int64_t const row = row_of(x, r);
      if (row >= 0) add_some(sum, weight_of(x, r), m + row * m_stride, x.width - col);
    }
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) bias_gradient_kernel(BiasGradient x, int64_t m_stride,
                                                                 int64_t db_stride, int blocks,
                                                                 bool aligned) {
  __shared__ float part[kWarps][kColumns], block_sum[kColumns];
  int const rank = cluster_rank(), warp = threadIdx.x / 32, local = threadIdx.x % 32 * 8;
  unsigned const cluster = blockIdx.x / unsigned(blocks), experts = unsigned(x.experts);
  int const expert = int(cluster % experts), begin_col = int(cluster / experts) * kColumns;
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
  int const mine = kColumns / blocks, column = rank * mine + int(threadIdx.x);
  bool const stores = int(threadIdx.x) < mine && begin_col + column < x.width;
  if (blocks > 1) {
    block_sum[threadIdx.x] = total;
    cluster_barrier();
    total = 0;
    for (int b = 0; stores && b < blocks; ++b) total += load_from_block(&block_sum[column], b);
    cluster_barrier();  // the other blocks have read `block_sum`
  }
  if (!stores) return;
  store_element<T>(x.db.data, x.db_dtype == DType::float32, x.accumulate,
                   expert * db_stride + begin_col + column, total);
}

// Blocks per cluster: more for few clusters, as long as each block has rows.
int cluster_size(BiasGradient const& x, int64_t clusters) {
  int blocks = 1;
  while (blocks < kMostBlocks && clusters * blocks < kEnoughBlocks &&
         x.experts * blocks * kWarps * kAtOnce < x.rows) {
    blocks *= 2;
  }
  return blocks;
}

}  // namespace

void bias_gradient(BiasGradient const& x, Queue queue) {
  check(x);
  require_16_bit(x.dtype);
  require_at_most(x.rows, kMostCounted, "rows");
  int64_t const stride = row_stride(x.m, x.width);
  bool const aligned =
      x.width % 8 == 0 && stride % 8 == 0 && reinterpret_cast<uintptr_t>(x.m.data) % 16 == 0;
  int64_t const clusters = ceil_div(x.width, kColumns) * x.experts;
  int const blocks = cluster_size(x, clusters);
  with_type(x.dtype, [&](auto element) {
    cuda_check(launch_kernel(bias_gradient_kernel<decltype(element)>,
                             {.blocks = unsigned(clusters * blocks),
                              .threads = kThreads,
                              .stream = queue.stream,
                              .cluster = blocks},
                             x, stride, row_stride(x.db, x.width), blocks, aligned),
               "launch of bias_gradient");
  });
}

}  // namespace guild::cuda
