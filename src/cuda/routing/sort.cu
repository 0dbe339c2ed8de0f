// Stable counting sort of slots by expert. Up to 4,096 slots: one cluster, one thread per slot
// (sort.cuh). More: two kernels, the first with one block per chunk of slots, the second with a
// few:
//
//   rank      numbers each expert's slots in the chunk; each cluster adds up its blocks' histograms
//   scatter   adds up the clusters' histograms, all for the offsets and those before its chunk for
//             the chunk's first rows; gives each slot its row
//
// Workspace: (clusters, E) rows per cluster; then (chunks, E) rows of the chunk's cluster that
// precede the chunk. Ranks follow from a fixed order of warps and from warp votes, and only
// integers are added atomically, so every run gives the same result.
#include "cuda/routing/sort.cuh"

#include <algorithm>

#include "checks/check.h"
#include "cuda/alignment.h"
#include "cuda/exchange/copies.h"
#include "cuda/require_runnable.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = kSortThreads, kWarps = kSortWarps, kCluster = kSortCluster;
constexpr int kMostClusters = int(kMostSortChunks) / kCluster;
static_assert(kCluster <= kMostClusterBlocks);
constexpr int kAtOnce = 4;  // slots that a thread loads before it uses them

// The ids of slots begin + lane, 32 apart.
struct RawIds {
  RawId id[kAtOnce];

  __device__ RawIds(Sort const& x, int64_t begin, SlotSpan const& used) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) id[i] = load_id(x, begin + 32 * i + threadIdx.x % 32, used);
  }
};

__device__ int* cluster_counts(Sort const& x, int64_t cluster) {
  return static_cast<int*>(x.workspace) + cluster * x.experts;
}
__device__ int* counts_before(Sort const& x, int64_t clusters, int64_t chunk) {
  return cluster_counts(x, clusters + chunk);
}

// Adds up the cluster's histograms; each block does some of the experts. count: the block's, (E).
__device__ void add_up_cluster(Sort const& x, int const* count) {
  int const experts = int(x.experts), rank = cluster_rank();
  int const part = (experts + kCluster - 1) / kCluster, end = min(experts, (rank + 1) * part);
  int64_t const cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
#pragma unroll 1
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

// Numbers the slots of this warp in order, 32 at a time. next: (E), its next number per expert.
__device__ void rank_slots(Sort const& x, int* next, int64_t begin, int64_t end,
                           SlotSpan const& used) {
  int const lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t base = begin; base < end; base += 32 * kAtOnce) {
    RawIds const ids(x, base, used);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + 32 * i >= end) break;
      int const id = ids.id[i].expert(x);
      unsigned const same = __match_any_sync(~0u, id);
      int const before = __popc(same & ((1u << lane) - 1));
      int const rank = id >= 0 ? next[id] + before : 0;
      __syncwarp();
      if (id >= 0 && before == 0) next[id] += __popc(same);
      __syncwarp();
      if (base + 32 * i + lane < end) x.slot_row[base + 32 * i + lane] = rank;
    }
  }
}

// Sets slot_row to each slot's rank among the chunk's slots of its expert.
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads)
rank_kernel(Sort x, int64_t chunk) {
  extern __shared__ int memory[];  // (E) rows of the chunk, (kWarps, E) next number of each warp
  int const experts = int(x.experts), warp = threadIdx.x / 32;
  int64_t const begin = blockIdx.x * chunk, end = min(begin + chunk, slot_count(x));
  int64_t const warp_begin = begin + warp * (chunk / kWarps);
  int64_t const warp_end = min(warp_begin + chunk / kWarps, end);
  int *const count = memory, *const next = memory + experts;
#pragma unroll 1
  for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) next[i] = 0;
  wait_for_previous();
  SlotSpan used = used_slots(x);
  used.end = min(used.end, warp_end);
  __syncthreads();
#pragma unroll 1
  for (int64_t base = warp_begin; base < used.end; base += 32 * kAtOnce) {
    RawIds const ids(x, base, used);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const id = ids.id[i].expert(x);
      if (id >= 0) atomicAdd(&next[warp * experts + id], 1);
    }
  }
  __syncthreads();
  add_up_warps(experts, next, count);
  cluster_barrier();
  let_next_start();
  add_up_cluster(x, count);
  rank_slots(x, next + warp * experts, warp_begin, warp_end, used);
  cluster_barrier();  // the other blocks have read `count`
}

// A slot before it gets its row.
struct Slot {
  RawId id;
  int rank = 0;
  float score = 0;
};
__device__ Slot load_slot(Sort const& x, int64_t slot, int64_t end, SlotSpan const& used) {
  Slot s;
  if (slot >= end) return s;
  s.id = load_id(x, slot, used);
  s.rank = x.slot_row[slot];
  if (x.scores != nullptr) s.score = static_cast<float const*>(x.scores)[slot];
  return s;
}

// Blocks with the same blockIdx.x share a chunk, `part` slots each. Instructions run only a few
// times each, so loops stay rolled: fetching unrolled code would take longer than running it.
__global__ void __launch_bounds__(kThreads) scatter_kernel(Sort x, int64_t chunk, int64_t part,
                                                           int clusters) {
  extern __shared__ int first_row[];  // (E)
  int64_t const begin = blockIdx.x * chunk + blockIdx.y * part;
  int64_t const chunk_end = min((blockIdx.x + 1) * chunk, slot_count(x));
  wait_for_previous();
  int64_t const end = min(begin + part, chunk_end);
  SlotSpan const used = used_slots(x);
  int64_t slot = begin + threadIdx.x;
  Slot s = load_slot(x, slot, end, used);
  auto const rows_of = [&](int e) {
    ExpertRows rows{0, counts_before(x, clusters, blockIdx.x)[e]};
    int count[kMostClusters];
#pragma unroll
    for (int c = 0; c < kMostClusters; ++c) count[c] = c < clusters ? cluster_counts(x, c)[e] : 0;
#pragma unroll
    for (int c = 0; c < kMostClusters; ++c) {
      rows.total += count[c];
      rows.earlier += c < int(blockIdx.x) / kCluster ? count[c] : 0;
    }
    return rows;
  };
  int const rows = find_first_rows(x, rows_of, first_row);
#pragma unroll 1
  while (slot < end) {
    int const expert = s.id.expert(x);
    put_slot(x, slot, expert >= 0 ? first_row[expert] + s.rank : -1, s.score);
    slot += kThreads;
    s = load_slot(x, slot, end, used);
  }
  // Rows without a slot come last; the block of slot r clears row r.
#pragma unroll 1
  for (int64_t row = max(begin, int64_t(rows)) + threadIdx.x; row < min(end, row_count(x));
       row += kThreads) {
    clear_row(x, row);
  }
}

// Slots per block of the second kernel: a part of the chunk, larger with more experts, since each
// block adds up all histograms.
int64_t part_slots(int64_t chunk, int64_t experts) {
  int64_t const blocks = std::clamp<int64_t>(1024 / experts, 1, 4), fill = blocks * kThreads;
  return ceil_div(chunk, fill) * kThreads;
}

void sort_many(Sort const& x, int64_t slots, Queue const& queue) {
  int64_t const chunk = sort_chunk_slots(slots), clusters = sort_clusters(slots);
  auto const rank_bytes = [](int64_t experts) { return int((kWarps + 1) * experts * sizeof(int)); };
  static AllowedOn allowed;
  allow_shared_memory(rank_kernel, rank_bytes(kMostRouted), allowed,
                      "shared memory of sort_by_expert");
  cuda_check(launch_kernel(rank_kernel,
                           {.blocks = unsigned(clusters * kCluster),
                            .threads = kThreads,
                            .bytes = rank_bytes(x.experts),
                            .stream = queue.stream,
                            .early = true},
                           x, chunk),
             "launch of sort_by_expert");
  int64_t const part = part_slots(chunk, x.experts), parts = ceil_div(chunk, part);
  dim3 const blocks(unsigned(sort_chunks(slots)), unsigned(parts));
  cuda_check(launch_kernel(scatter_kernel,
                           {.blocks = blocks,
                            .threads = kThreads,
                            .bytes = x.experts * int64_t(sizeof(int)),
                            .stream = queue.stream,
                            .early = true},
                           x, chunk, part, int(clusters)),
             "launch of sort_by_expert");
}

// waits_last: as in sort_few_kernel, which alone heeds it.
void sort(Sort const& x, bool waits_last, Queue const& queue) {
  require_runnable(x);
  int64_t const slots = slot_count(x);
  if (slots == 0) {
    cuda_check(cudaMemsetAsync(x.offsets, 0, (x.experts + 1) * sizeof(int32_t), queue.stream),
               "clearing the offsets");
  } else if (are_few(slots)) {
    sort_few(x, StoredSlots{}, waits_last, queue);
  } else {
    sort_many(x, slots, queue);
  }
}

}  // namespace

void require_runnable(Sort const& x) {
  check(x);
  require(x.scores == nullptr || x.score_dtype == DType::float32,
          "score_dtype: expected float32 on CUDA");
  require_routable(x.experts);
  require_at_most(slot_count(x), kMostCounted, "slots");
}

void sort_by_expert(Sort const& x, Queue queue) { sort(x, /*waits_last=*/false, queue); }
void sort_beside(Sort const& x, Queue const& queue) { sort(x, /*waits_last=*/true, queue); }

}  // namespace guild::cuda
