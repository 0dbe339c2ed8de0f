// db[e] = the sums of columns over the chunks of the expert's rows, added up in a fixed order: a
// block per expert and 128 columns, of dH where the grid's y is 0, of s dO where it is 1. A
// warp adds every eighth chunk, the block the warps' sums.
#include "bias_sums.cuh"

#include "element.cuh"
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
  int32_t const* offsets;  // (E + 1)
  int rows;
  bool is_float, accumulate;  // of db
  ColumnSums sums[2];
};

template <class T>
__global__ void __launch_bounds__(kThreads) bias_sums_kernel(__grid_constant__ Arguments const x) {
  __shared__ float part[kWarps][kColumns];
  ColumnSums const& sums = x.sums[blockIdx.y];
  int const expert = blockIdx.z, first_column = int(blockIdx.x) * kColumns;
  if (first_column >= sums.columns) return;
  int const warp = threadIdx.x / 32, local = threadIdx.x % 32 * 4, column = first_column + local;
  int const begin = max(x.offsets[expert], 0), end = min(x.offsets[expert + 1], x.rows);
  int const count = end > begin ? int(pieces(end - begin, kChunkRows)) : 0;
  float4 total{};
  if (column < sums.columns) {
    float const* const from = sums.chunk + int64_t(chunk_of(begin, expert)) * sums.columns + column;
#pragma unroll 4
    for (int i = warp; i < count; i += kWarps) {
      float4 const more = *reinterpret_cast<float4 const*>(from + int64_t(i) * sums.columns);
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
      x.routing.offsets,
      int(s.rows()),
      x.db_dtype == DType::float32,
      x.accumulate,
      {sums_of(sums.dh, x.db_up, width), sums_of(sums.dout, x.db_down, s.hidden)}};
  dim3 const grid(unsigned(pieces(std::max(width, s.hidden), kColumns)), 2, unsigned(s.experts));
  with_type(x.dtype, [&](auto element) {
    bias_sums_kernel<decltype(element)><<<grid, kThreads, 0, queue.stream>>>(arguments);
  });
  cuda_check(cudaGetLastError(), "launch of bias_sums");
}

}  // namespace guild::cuda
