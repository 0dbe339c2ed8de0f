// db[e] = the column sums over the chunks of the expert's rows, added in a fixed order: one block
// per expert and 128 columns, for dH where the grid's y is 0, for s dO where it is 1. Each warp
// adds up every eighth chunk, then the block adds up its warps' sums.
//
// The down gradient computes the sums of s dO with each score split into three 16-bit terms
// (sm90/column_sums.cuh). Infinity times a zero term, or minus another infinity, gives a NaN that
// the true sum may not have. Scaling by up to 2^15 makes bfloat16 terms above some 1e34 infinite.
// So this kernel sums any chunk whose sum is not finite again, row by row.
#include "cuda/rows/bias_sums.h"

#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "shared/bias_sums.h"

namespace guild::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = 32 * 4;

struct ColumnSums {
  float const* chunk;  // (chunks, columns)
  void* db;            // (E, columns), rows `stride` elements apart
  int64_t stride;
  int columns;  // 0: not wanted
};

struct Arguments {
  DownGradient step;
  int64_t dout_stride;
  int32_t const* offsets;  // (E + 1)
  int rows;
  bool is_float, accumulate;  // of db
  ColumnSums sums[2];
};

__device__ bool all_finite(float4 const& v) {
  return isfinite(v.x) && isfinite(v.y) && isfinite(v.z) && isfinite(v.w);
}

// The sums of s dO over rows [begin, end), of four columns.
template <class T>
__device__ __noinline__ float4 sum_rows(Arguments const& x, int begin, int end, int column) {
  DownGradient const& step = x.step;
  Routing const& routing = step.routing;
  auto const* const score = static_cast<float const*>(routing.row_score);
  float4 sum{};
#pragma unroll 1
  for (int row = begin; row < end; ++row) {
    int const token = routing.row_token == nullptr ? row : routing.row_token[row];
    if (routing.row_token != nullptr && unsigned(token) >= unsigned(step.sizes.tokens)) continue;
    T const* const v = static_cast<T const*>(step.dout.data) + token * x.dout_stride + column;
    float const s = score == nullptr ? 1.f : score[row];
    sum.x += s * float(v[0]), sum.y += s * float(v[1]);
    sum.z += s * float(v[2]), sum.w += s * float(v[3]);
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) bias_sums_kernel(__grid_constant__ Arguments const x) {
  __shared__ float part[kWarps][kColumns];
  ColumnSums const& sums = x.sums[blockIdx.y];
  int const expert = blockIdx.z, first_column = int(blockIdx.x) * kColumns;
  if (first_column >= sums.columns) return;
  int const warp = threadIdx.x / 32, local = threadIdx.x % 32 * 4, column = first_column + local;
  int const begin = max(x.offsets[expert], 0), end = min(x.offsets[expert + 1], x.rows);
  int const count = end > begin ? int(ceil_div(end - begin, kBiasChunkRows)) : 0;
  float4 total{};
  if (column < sums.columns) {
    float const* const from =
        sums.chunk + int64_t(bias_chunk_of(begin, expert)) * sums.columns + column;
#pragma unroll 4
    for (int i = warp; i < count; i += kWarps) {
      float4 more = *reinterpret_cast<float4 const*>(from + int64_t(i) * sums.columns);
      if (blockIdx.y == 1 && !all_finite(more)) {
        int const row = begin + i * kBiasChunkRows;
        more = sum_rows<T>(x, row, min(row + kBiasChunkRows, end), column);
      }
      total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
    }
  }
  *reinterpret_cast<float4*>(&part[warp][local]) = total;
  __syncthreads();
  int const mine = first_column + int(threadIdx.x);
  if (int(threadIdx.x) >= kColumns || mine >= sums.columns) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += part[w][threadIdx.x];
  store_element<T>(sums.db, x.is_float, x.accumulate, expert * sums.stride + mine, sum);
}

ColumnSums sums_of(void* chunk, Rows const& db, int64_t columns) {
  if (db.data == nullptr) return {};
  return {static_cast<float const*>(chunk), db.data, row_stride(db, columns), int(columns)};
}

}  // namespace

void add_bias_sums(DownGradient const& x, BiasSums const& sums, Queue const& queue) {
  Sizes const& s = x.sizes;
  int64_t const width = s.intermediate * (x.activation.gated ? 2 : 1);
  Arguments const arguments{
      .step = x,
      .dout_stride = row_stride(x.dout, s.hidden),
      .offsets = x.routing.offsets,
      .rows = int(s.rows()),
      .is_float = x.db_dtype == DType::float32,
      .accumulate = x.accumulate,
      .sums = {sums_of(sums.dh, x.db_up, width), sums_of(sums.dout, x.db_down, s.hidden)}};
  dim3 const grid(unsigned(ceil_div(std::max(width, s.hidden), kColumns)), 2, unsigned(s.experts));
  with_type(x.dtype, [&](auto element) {
    bias_sums_kernel<decltype(element)><<<grid, kThreads, 0, queue.stream>>>(arguments);
  });
  cuda_check(cudaGetLastError(), "launch of bias_sums");
}

}  // namespace guild::cuda
