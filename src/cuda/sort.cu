// Stable counting sort of slots by expert, in two kernels of one block a chunk of slots:
//
//   rank      numbers the chunk's slots of each expert; a cluster of blocks adds up its chunks
//   scatter   adds up the clusters' histograms, of all for the offsets and of those before its own
//             for where its rows begin, and gives each slot its row
//
// Workspace: (clusters, E) rows of each cluster, then (chunks, E) rows of a chunk's cluster before
// it. Ranks follow from a fixed order of warps and from warp votes; atomic additions of integers
// only count, so the result is the same in every run.
#include "arch/barrier.cuh"
#include "check.h"
#include "gemm/launch.cuh"
#include "shared/routing.h"
#include "shared/sorting.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = int(kSortThreads), kWarps = kThreads / 32;
constexpr int kCluster = int(kSortCluster);
constexpr int kAtOnce = 4;  // slots that a thread loads before it uses them

// A slot's expert; -1 past `end`, for slots of no token and for ids outside [0, E).
__device__ int id_of(Sort const& x, int64_t slot, int64_t end) {
  if (slot >= end || slot >= used_slots(x)) return -1;
  int64_t const id = x.ids_are_int64 ? static_cast<int64_t const*>(x.ids)[slot]
                                     : int64_t(static_cast<int32_t const*>(x.ids)[slot]);
  return id >= 0 && id < x.experts ? int(id) : -1;
}

__device__ int* cluster_counts(Sort const& x, int64_t cluster) {
  return static_cast<int*>(x.workspace) + cluster * x.experts;
}
__device__ int* counts_before(Sort const& x, int64_t clusters, int64_t chunk) {
  return cluster_counts(x, clusters + chunk);
}

// `at` of another block of the cluster.
__device__ int load_from_block(int const* at, int rank) {
  int value;
  asm volatile(
      "{\n"
      ".reg .u32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [there];\n"
      "}"
      : "=r"(value)
      : "r"(shared_address(at)), "r"(rank)
      : "memory");
  return value;
}

// Adds up the cluster's histograms; each block does a part of the experts. count: (E) of a block.
__device__ void add_up_cluster(Sort const& x, int const* count) {
  int const experts = int(x.experts), rank = cluster_rank();
  int const part = (experts + kCluster - 1) / kCluster, end = min(experts, (rank + 1) * part);
  int64_t const cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  for (int e = rank * part + int(threadIdx.x); e < end; e += kThreads) {
    int rows[kCluster], before = 0;
#pragma unroll
    for (int r = 0; r < kCluster; ++r) rows[r] = load_from_block(&count[e], r);
#pragma unroll
    for (int r = 0; r < kCluster; ++r) {
      counts_before(x, clusters, cluster * kCluster + r)[e] = before;
      before += rows[r];
    }
    cluster_counts(x, cluster)[e] = before;
  }
}

// Numbers the slots of this warp, 32 at a time in order. next: (E) of this warp, the next number of
// each expert.
__device__ void rank_slots(Sort const& x, int* next, int64_t begin, int64_t end) {
  int const lane = threadIdx.x % 32;
  for (int64_t base = begin; base < end; base += 32 * kAtOnce) {
    int id[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) id[i] = id_of(x, base + 32 * i + lane, end);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + 32 * i >= end) break;
      unsigned const same = __match_any_sync(~0u, id[i]);
      int const before = __popc(same & ((1u << lane) - 1));
      int const rank = id[i] >= 0 ? next[id[i]] + before : 0;
      __syncwarp();
      if (id[i] >= 0 && before == 0) next[id[i]] += __popc(same);
      __syncwarp();
      if (base + 32 * i + lane < end) x.slot_row[base + 32 * i + lane] = rank;
    }
  }
}

// slot_row becomes each slot's number among the chunk's slots of its expert.
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads)
rank_kernel(Sort x, int64_t chunk) {
  extern __shared__ int memory[];  // (E) rows of the chunk, (kWarps, E) next number of each warp
  int const experts = int(x.experts), warp = threadIdx.x / 32;
  int64_t const begin = blockIdx.x * chunk, end = min(begin + chunk, slot_count(x));
  int64_t const warp_begin = begin + warp * (chunk / kWarps);
  int64_t const warp_end = min(warp_begin + chunk / kWarps, end);
  int *const count = memory, *const next = memory + experts;
  for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) next[i] = 0;
  __syncthreads();
#pragma unroll 4
  for (int64_t slot = warp_begin + threadIdx.x % 32; slot < warp_end; slot += 32) {
    int const id = id_of(x, slot, warp_end);
    if (id >= 0) atomicAdd(&next[warp * experts + id], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int rows[kWarps], before = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) rows[w] = next[w * experts + e];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      next[w * experts + e] = before;
      before += rows[w];
    }
    count[e] = before;
  }
  cluster_barrier();
  add_up_cluster(x, count);
  rank_slots(x, next + warp * experts, warp_begin, warp_end);
  cluster_barrier();  // the other blocks have read `count`
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

// Turns totals (E) into the first row of each expert; returns the number of rows. The first block
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

// The first row of the chunk's slots of each expert into `first`: (E). Returns the number of rows.
__device__ int first_rows(Sort const& x, int64_t clusters, int* first, int* before) {
  int const mine = blockIdx.x / kCluster;
  for (int e = threadIdx.x; e < x.experts; e += kThreads) {
    int total = 0, earlier = counts_before(x, clusters, blockIdx.x)[e];
#pragma unroll 16
    for (int c = 0; c < clusters; ++c) {
      int const count = cluster_counts(x, c)[e];
      total += count;
      earlier += c < mine ? count : 0;
    }
    first[e] = total;
    before[e] = earlier;
  }
  __syncthreads();
  int const rows = scan_totals(x, first);
  for (int e = threadIdx.x; e < x.experts; e += kThreads) first[e] += before[e];
  __syncthreads();
  return rows;
}

// What a thread gives rows to in one go.
struct Slots {
  int64_t first;
  int id[kAtOnce], rank[kAtOnce];
  float score[kAtOnce];

  __device__ void load(Sort const& x, int64_t begin, int64_t end) {
    first = begin + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int64_t const slot = first + i * kThreads;
      id[i] = id_of(x, slot, end);
      rank[i] = slot < end ? x.slot_row[slot] : 0;
      bool const scored = slot < end && x.scores != nullptr;
      score[i] = scored ? static_cast<float const*>(x.scores)[slot] : 0;
    }
  }
  __device__ void place(Sort const& x, int const* first_row, int64_t end) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int64_t const slot = first + i * kThreads;
      if (slot >= end) break;
      int const row = id[i] >= 0 ? first_row[id[i]] + rank[i] : -1;
      x.slot_row[slot] = row;
      if (row < 0) continue;
      x.row_token[row] = int(token_of(x.token_offsets, x.tokens, x.top_k, slot));
      if (x.row_score != nullptr) static_cast<float*>(x.row_score)[row] = score[i];
    }
  }
};

__global__ void __launch_bounds__(kThreads) scatter_kernel(Sort x, int64_t chunk,
                                                           int64_t clusters) {
  extern __shared__ int memory[];  // (E) twice
  int64_t const begin = blockIdx.x * chunk, end = min(begin + chunk, slot_count(x));
  Slots slots;
  slots.load(x, begin, end);
  int const rows = first_rows(x, clusters, memory, memory + x.experts);
  for (int64_t at = begin;;) {
    slots.place(x, memory, end);
    at += kAtOnce * kThreads;
    if (at >= end) break;
    slots.load(x, at, end);
  }
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
  int64_t const slots = slot_count(x), chunk = sort_chunk_slots(slots);
  if (slots == 0) {
    cuda_check(cudaMemsetAsync(x.offsets, 0, (x.experts + 1) * sizeof(int32_t), queue.stream),
               "clearing the offsets");
    return;
  }
  auto const rank_bytes = [](int64_t experts) { return int((kWarps + 1) * experts * sizeof(int)); };
  cuda_check(cudaFuncSetAttribute(rank_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  rank_bytes(kMostExperts)),
             "shared memory of sort_by_expert");
  int64_t const clusters = sort_clusters(slots);
  rank_kernel<<<unsigned(clusters * kCluster), kThreads, rank_bytes(x.experts), queue.stream>>>(
      x, chunk);
  scatter_kernel<<<unsigned(sort_chunks(slots)), kThreads, 2 * x.experts * sizeof(int),
                   queue.stream>>>(x, chunk, clusters);
  cuda_check(cudaGetLastError(), "launch of sort_by_expert");
}

}  // namespace guild::cuda
