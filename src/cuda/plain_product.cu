// The grouped product without tensor cores: a block computes one 64 x 64 tile at a time, with its
// operands staged in slabs of shared memory.
#include "cuda/plain_product.h"

#include "cuda/device.h"
#include "cuda/element.cuh"
#include "shared/gemm_config.h"
#include "shared/row_stride.h"

namespace guild::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256;

// One tile's sums: each thread has 4 x 4 of them, rows ty + 16 i and columns tx + 16 j.
struct Sums {
  float value[4][4] = {};
};

template <class T>
struct Slabs {
  float a[kDepth][kTile + 1], b[kDepth][kTile + 1];

  // Loads k .. k + kDepth of A's 64 rows and B's 64 columns; zeros outside.
  __device__ void fill(T const* from_a, T const* from_b, GroupedGemm::Operand const& a_shape,
                       GroupedGemm::Operand const& b_shape, int rows, int columns, int left) {
    for (int i = threadIdx.x; i < kDepth * kTile; i += kThreads) {
      int const k = i % kDepth, r = i / kDepth;
      a[k][r] = r < rows && k < left
                    ? float(from_a[r * a_shape.row_stride + k * a_shape.col_stride])
                    : 0.f;
      b[k][r] = r < columns && k < left
                    ? float(from_b[k * b_shape.row_stride + r * b_shape.col_stride])
                    : 0.f;
    }
  }
};

template <class T>
__device__ Sums sum_tile(PlainProduct const& p, Slabs<T>& slabs, T const* a, T const* b, int rows,
                         int columns, int inner) {
  int const tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  Sums sums;
  for (int k = 0; k < inner; k += kDepth) {
    slabs.fill(a + k * p.a.col_stride, b + k * p.b.row_stride, p.a, p.b, rows, columns, inner - k);
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < kDepth; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums.value[i][j] += slabs.a[kk][ty + 16 * i] * slabs.b[kk][tx + 16 * j];
        }
      }
    }
    __syncthreads();
  }
  return sums;
}

template <class T>
__device__ void store_tile(PlainProduct const& p, Sums const& sums, int64_t start, T const* bias,
                           int rows, int columns) {
  int const tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int const r = ty + 16 * i, c = tx + 16 * j;
      if (r >= rows || c >= columns) continue;
      int64_t const at = start + r * p.d.row_stride + c * p.d.col_stride;
      float const x = sums.value[i][j] + (bias == nullptr ? 0.f : float(bias[c]));
      store_element<T>(p.d.data, p.out_dtype == DType::float32, p.accumulate, at, x);
    }
  }
}

__device__ inline int64_t start_of(GroupedGemm::Operand const& x, int group) {
  return placed(x.group_at, group) * x.group_stride;
}

template <class T, class Work>
__global__ void __launch_bounds__(kThreads, 2) plain_kernel(PlainProduct p, Work work) {
  __shared__ Slabs<T> slabs;
  TileWalk<Work> walk{work, int(blockIdx.x), int(gridDim.x)};
  int64_t const bias_stride = row_stride(p.bias, p.n);
  for (Tile tile; walk.next(tile);) {
    // Rows of A and D count from their group's first where groups have a stride of their own.
    int64_t const row = tile.row - int64_t(tile.expert) * p.rows_per_group;
    int64_t const a_at =
        start_of(p.a, tile.expert) + row * p.a.row_stride + tile.inner_row * p.a.col_stride;
    int64_t const b_at =
        start_of(p.b, tile.expert) + tile.inner_row * p.b.row_stride + tile.col * p.b.col_stride;
    int64_t const d_at =
        start_of(p.d, tile.expert) + row * p.d.row_stride + tile.col * p.d.col_stride;
    bool const biased = p.bias.data != nullptr && tile.inner > 0;  // an empty sum is zero
    T const* const bias =
        !biased ? nullptr
                : static_cast<T const*>(p.bias.data) + tile.expert * bias_stride + tile.col;
    int const columns = min(p.n - tile.col, kTile);
    Sums const sums =
        sum_tile(p, slabs, static_cast<T const*>(p.a.data) + a_at,
                 static_cast<T const*>(p.b.data) + b_at, tile.rows, columns, tile.inner);
    store_tile(p, sums, d_at, bias, tile.rows, columns);
  }
}

template <class T>
void launch_plain(PlainProduct const& p, Queue const& queue) {
  int const blocks = 4 * multiprocessors(queue);
  if (p.sum_groups) {
    InnerTiles const work{.groups = p.groups,
                          .tile_n = kTile,
                          .rows = p.rows,
                          .across = int(ceil_div(p.n, kTile)),
                          .tile_m = kTile,
                          .tail_m = 0,
                          .band = kBand};
    plain_kernel<T><<<blocks, kThreads, 0, queue.stream>>>(p, work);
  } else {
    RowTiles const work{.groups = p.groups,
                        .tile_n = kTile,
                        .across = int(ceil_div(p.n, kTile)),
                        .inner = p.k,
                        .tile_m = kTile,
                        .tail_m = 0,
                        .band = kBand};
    plain_kernel<T><<<blocks, kThreads, 0, queue.stream>>>(p, work);
  }
  cuda_check(cudaGetLastError(), "launch of a plain product");
}

}  // namespace

void plain_product(PlainProduct const& p, Queue const& queue) {
  with_type(p.dtype, [&](auto element) { launch_plain<decltype(element)>(p, queue); });
}

}  // namespace guild::cuda
