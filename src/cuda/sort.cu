// Stable counting sort of slots by expert, in two kernels of one block a chunk of slots:
//
//   count     the chunk's histogram
//   scatter   adds up the histograms, of all chunks for the offsets and of those before its own for
//             where its rows begin, and gives each slot its row
//
// Every block repeats the sum over at most 128 histograms: 64 KiB from L2 at 128 experts, less than
// a launch costs. Rows within a chunk follow from a fixed order of warps and from warp votes;
// atomic additions of integers only count, so the result is the same in every run.
#include "check.h"
#include "gemm/launch.cuh"
#include "shared/sorting.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = int(kSortThreads), kWarps = kThreads / 32;

// A slot's expert; -1 past `end` and for ids outside [0, E).
__device__ int id_of(Sort const& x, int64_t slot, int64_t end) {
  if (slot >= end) return -1;
  int64_t const id = x.ids_are_int64 ? static_cast<int64_t const*>(x.ids)[slot]
                                     : int64_t(static_cast<int32_t const*>(x.ids)[slot]);
  return id >= 0 && id < x.experts ? int(id) : -1;
}

__global__ void __launch_bounds__(kThreads) count_kernel(Sort x, int64_t chunk) {
  extern __shared__ int histogram[];  // (E)
  int64_t const begin = blockIdx.x * chunk, end = min(begin + chunk, x.tokens * x.top_k);
  for (int e = threadIdx.x; e < x.experts; e += kThreads) histogram[e] = 0;
  __syncthreads();
#pragma unroll 4
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += kThreads) {
    int const id = id_of(x, slot, end);
    if (id >= 0) atomicAdd(&histogram[id], 1);
  }
  __syncthreads();
  int* const out = static_cast<int*>(x.workspace) + blockIdx.x * x.experts;
  for (int e = threadIdx.x; e < x.experts; e += kThreads) out[e] = histogram[e];
}

// What one block of scatter_kernel shares; the arrays are (E), warp_row is (kWarps, E).
struct ScatterShared {
  int *total, *before, *warp_row;

  __device__ ScatterShared(int* memory, int experts)
      : total(memory), before(memory + experts), warp_row(memory + 2 * experts) {}
  static size_t bytes(int64_t experts) { return size_t(kWarps + 2) * experts * sizeof(int); }
};

// Rows of each expert, in all chunks and in those before this one. Threads share an expert's chunks
// where there are fewer experts than threads.
__device__ void add_histograms(Sort const& x, ScatterShared const& s, int chunks) {
  int const experts = int(x.experts);
  int const* const counts = static_cast<int const*>(x.workspace);
  int const sharers = experts >= kThreads ? 1 : kThreads / experts;
  for (int i = threadIdx.x; i < experts * sharers; i += kThreads) {
    int const e = i % experts;
    int total = 0, before = 0;
#pragma unroll 16
    for (int c = i / experts; c < chunks; c += sharers) {
      int const count = counts[int64_t(c) * experts + e];
      total += count;
      before += c < int(blockIdx.x) ? count : 0;
    }
    atomicAdd(&s.total[e], total);
    atomicAdd(&s.before[e], before);
  }
}

// Inclusive sums over the warp's lanes.
__device__ int warp_scan(int value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int const other = __shfl_up_sync(~0u, value, step);
    if (int(threadIdx.x % 32) >= step) value += other;
  }
  return value;
}

// Turns totals into the first row of each expert; returns the number of rows. The first block
// writes them out as the offsets.
__device__ int scan_totals(Sort const& x, int* total) {
  __shared__ int warp_sum[kWarps];
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = int(x.experts);
  int carry = 0;
  for (int base = 0; base < experts; base += kThreads) {
    int const e = base + int(threadIdx.x);
    int const count = e < experts ? total[e] : 0;
    int const inclusive = warp_scan(count);
    if (lane == 31) warp_sum[warp] = inclusive;
    __syncthreads();
    int const sums = warp_scan(lane < kWarps ? warp_sum[lane] : 0);
    int const before_warp = warp == 0 ? 0 : __shfl_sync(~0u, sums, warp - 1);
    int const first = carry + before_warp + inclusive - count;
    carry += __shfl_sync(~0u, sums, kWarps - 1);
    if (e < experts) total[e] = first;
    if (e < experts && blockIdx.x == 0) x.offsets[e] = first;
    __syncthreads();
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) x.offsets[experts] = carry;
  return carry;
}

// Gives the slots of this warp, 32 at a time in order, the next rows of their experts. warp_row:
// (E) of this warp, the next row of each.
__device__ void place_slots(Sort const& x, int* warp_row, int64_t begin, int64_t end) {
  int const lane = threadIdx.x % 32;
  for (int64_t base = begin; base < end; base += 32) {
    int64_t const slot = base + lane;
    int const id = id_of(x, slot, end);
    unsigned const same = __match_any_sync(~0u, id);
    int const rank = __popc(same & ((1u << lane) - 1));
    int const row = id >= 0 ? warp_row[id] + rank : -1;
    __syncwarp();
    if (id >= 0 && rank == 0) warp_row[id] += __popc(same);
    __syncwarp();
    if (slot < end) x.slot_row[slot] = row;
    if (row >= 0) {
      x.row_token[row] = int(unsigned(slot) / unsigned(x.top_k));  // slots fit 31 bits
      if (x.row_score != nullptr) {
        static_cast<float*>(x.row_score)[row] = static_cast<float const*>(x.scores)[slot];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) scatter_kernel(Sort x, int64_t chunk) {
  extern __shared__ int memory[];
  int const experts = int(x.experts), warp = threadIdx.x / 32;
  ScatterShared const s(memory, experts);
  int64_t const slots = x.tokens * x.top_k;
  int64_t const begin = blockIdx.x * chunk, end = min(begin + chunk, slots);
  int64_t const warp_begin = begin + warp * (chunk / kWarps);
  int64_t const warp_end = min(warp_begin + chunk / kWarps, end);
  int* const warp_row = s.warp_row + warp * experts;
  for (int i = threadIdx.x; i < (kWarps + 2) * experts; i += kThreads) memory[i] = 0;
  __syncthreads();
  for (int64_t slot = warp_begin + threadIdx.x % 32; slot < warp_end; slot += 32) {
    int const id = id_of(x, slot, warp_end);
    if (id >= 0) atomicAdd(&warp_row[id], 1);
  }
  add_histograms(x, s, int(gridDim.x));
  __syncthreads();
  int const rows = scan_totals(x, s.total);
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int next = s.total[e] + s.before[e];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      int const count = s.warp_row[w * experts + e];
      s.warp_row[w * experts + e] = next;
      next += count;
    }
  }
  __syncthreads();
  place_slots(x, warp_row, warp_begin, warp_end);
  // Rows that no slot takes are the last ones: the block that owns slot r clears row r.
  for (int64_t row = max(begin, int64_t(rows)) + threadIdx.x; row < end; row += kThreads) {
    x.row_token[row] = 0;
    if (x.row_score != nullptr) static_cast<float*>(x.row_score)[row] = 0;
  }
}

}  // namespace

void sort_by_expert(Sort const& x, Queue queue) {
  check(x);
  require(x.scores == nullptr || x.score_dtype == DType::float32,
          "score_dtype: expected float32 on CUDA");
  constexpr int64_t kMostExperts = 1024;
  require(x.experts <= kMostExperts, "experts: expected at most ", kMostExperts, " on CUDA, got ",
          x.experts);
  int64_t const slots = x.tokens * x.top_k, chunk = sort_chunk_slots(slots);
  if (slots == 0) {
    cuda_check(cudaMemsetAsync(x.offsets, 0, (x.experts + 1) * sizeof(int32_t), queue.stream),
               "clearing the offsets");
    return;
  }
  cuda_check(cudaFuncSetAttribute(scatter_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  int(ScatterShared::bytes(kMostExperts))),
             "shared memory of sort_by_expert");
  unsigned const chunks = unsigned(sort_chunks(slots));
  count_kernel<<<chunks, kThreads, x.experts * sizeof(int), queue.stream>>>(x, chunk);
  scatter_kernel<<<chunks, kThreads, ScatterShared::bytes(x.experts), queue.stream>>>(x, chunk);
  cuda_check(cudaGetLastError(), "launch of sort_by_expert");
}

}  // namespace guild::cuda
