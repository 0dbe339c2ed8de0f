// Stable counting sort of slots by expert, in three kernels:
//
//   count     one block a chunk of kSortChunk slots: the chunk's histogram
//   scan      one block: where each expert begins, and where each chunk's rows of it begin
//   scatter   one block a chunk: a slot's row is that start plus its rank in the chunk
//
// Ranks come from warp votes and a fixed order of warps: no atomics decide a position.
#include "check.h"
#include "gemm/launch.cuh"
#include "shared/sorting.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = int(kSortChunk), kWarps = kThreads / 32;

__device__ int id_of(Sort const& x, int64_t slot, int64_t slots) {
  if (slot >= slots) return -1;
  int64_t const id = x.ids_are_int64 ? static_cast<int64_t const*>(x.ids)[slot]
                                     : int64_t(static_cast<int32_t const*>(x.ids)[slot]);
  return id >= 0 && id < x.experts ? int(id) : -1;
}

// Which lanes of the warp hold the same id.
__device__ unsigned peers(int id) { return __match_any_sync(~0u, id); }

__global__ void __launch_bounds__(kThreads) count_kernel(Sort x) {
  extern __shared__ int histogram[];
  int64_t const slots = x.tokens * x.top_k, slot = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  for (int e = threadIdx.x; e < x.experts; e += kThreads) histogram[e] = 0;
  __syncthreads();
  int const id = id_of(x, slot, slots);
  unsigned const same = peers(id);
  bool const first = __ffs(same) - 1 == int(threadIdx.x % 32);
  if (id >= 0 && first) atomicAdd(&histogram[id], __popc(same));  // a sum of integers: any order
  __syncthreads();
  int* const out = static_cast<int*>(x.workspace) + blockIdx.x * x.experts;
  for (int e = threadIdx.x; e < x.experts; e += kThreads) out[e] = histogram[e];
}

// Turns the histograms into starts. Thread t scans the chunks of experts t, t + kThreads, ...
__global__ void __launch_bounds__(kThreads) scan_kernel(Sort x, int chunks) {
  extern __shared__ int total[];  // (E) rows of each expert, then where each begins
  int* const counts = static_cast<int*>(x.workspace);
  for (int e = threadIdx.x; e < x.experts; e += kThreads) {
    int sum = 0;
#pragma unroll 8
    for (int c = 0; c < chunks; ++c) sum += counts[c * x.experts + e];
    total[e] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // one warp turns counts into starts, 32 experts at a time
    int before = 0;
    for (int base = 0; base < x.experts; base += 32) {
      int const e = base + int(threadIdx.x);
      int const count = e < x.experts ? total[e] : 0;
      int inclusive = count;
      for (int step = 1; step < 32; step *= 2) {
        int const other = __shfl_up_sync(~0u, inclusive, step);
        if (int(threadIdx.x) >= step) inclusive += other;
      }
      if (e < x.experts) {
        total[e] = before + inclusive - count;
        x.offsets[e] = before + inclusive - count;
      }
      before += __shfl_sync(~0u, inclusive, 31);
    }
    if (threadIdx.x == 0) x.offsets[x.experts] = before;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < x.experts; e += kThreads) {
    int start = total[e];
#pragma unroll 8
    for (int c = 0; c < chunks; ++c) {
      int const count = counts[c * x.experts + e];
      counts[c * x.experts + e] = start;
      start += count;
    }
  }
}

__global__ void __launch_bounds__(kThreads) scatter_kernel(Sort x) {
  extern __shared__ uint16_t warp_count[];  // (kWarps, E), then each warp's first rank
  int64_t const slots = x.tokens * x.top_k, slot = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * x.experts; i += kThreads) warp_count[i] = 0;
  __syncthreads();
  int const id = id_of(x, slot, slots);
  unsigned const same = peers(id);
  int const rank = __popc(same & ((1u << lane) - 1));
  if (id >= 0 && rank == 0) warp_count[warp * x.experts + id] = uint16_t(__popc(same));
  __syncthreads();
  for (int e = threadIdx.x; e < x.experts; e += kThreads) {
    int before = 0;
    for (int w = 0; w < kWarps; ++w) {
      int const count = warp_count[w * x.experts + e];
      warp_count[w * x.experts + e] = uint16_t(before);
      before += count;
    }
  }
  __syncthreads();
  if (slot >= slots) return;
  // Rows that no slot takes are the last ones: the block that owns slot r clears row r.
  if (slot >= x.offsets[x.experts]) {
    x.row_token[slot] = 0;
    if (x.row_score != nullptr) static_cast<float*>(x.row_score)[slot] = 0;
  }
  int row = -1;
  if (id >= 0) {
    int const start = static_cast<int*>(x.workspace)[blockIdx.x * x.experts + id];
    row = start + warp_count[warp * x.experts + id] + rank;
    x.row_token[row] = int(slot / x.top_k);
    if (x.row_score != nullptr) {
      static_cast<float*>(x.row_score)[row] = static_cast<float const*>(x.scores)[slot];
    }
  }
  x.slot_row[slot] = row;
}

}  // namespace

void sort_by_expert(Sort const& x, Queue queue) {
  check(x);
  require(x.scores == nullptr || x.score_dtype == DType::float32,
          "score_dtype: expected float32 on CUDA");
  constexpr int64_t kMostExperts = 1024;
  require(x.experts <= kMostExperts, "experts: expected at most ", kMostExperts, " on CUDA, got ",
          x.experts);
  int64_t const chunks = sort_chunks(x.tokens * x.top_k);
  int const bytes = int(x.experts * sizeof(int)), ranks = int(kWarps * x.experts * 2);
  cuda_check(cudaFuncSetAttribute(scatter_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  int(kWarps * kMostExperts * 2)),
             "shared memory of sort_by_expert");
  if (chunks > 0) count_kernel<<<unsigned(chunks), kThreads, bytes, queue.stream>>>(x);
  scan_kernel<<<1, kThreads, bytes, queue.stream>>>(x, int(chunks));
  if (chunks > 0) scatter_kernel<<<unsigned(chunks), kThreads, ranks, queue.stream>>>(x);
  cuda_check(cudaGetLastError(), "launch of sort_by_expert");
}

}  // namespace guild::cuda
