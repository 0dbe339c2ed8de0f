// Shared by the kernels that sort slots by expert; the whole sort where slots are few.
#pragma once
#include <algorithm>
#include <bit>

#include "cuda/alignment.h"
#include "cuda/arch/cluster.cuh"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/shared_memory.h"
#include "cuda/warp.cuh"
#include "guild/cuda.h"
#include "shared/ceil_div.h"
#include "shared/routing.h"
#include "shared/sorting.h"

namespace guild::cuda {

// An id as stored. load_id() issues the load, expert() waits for it.
struct RawId {
  int low = -1, high = 0;

  // -1 for ids outside [0, E).
  __device__ int expert(Sort const& x) const {
    return high == 0 && unsigned(low) < unsigned(x.experts) ? low : -1;
  }
};
// Slots that are not used have no id.
__device__ inline RawId load_id(Sort const& x, int64_t slot, SlotSpan const& used) {
  RawId id;
  if (slot < used.begin || slot >= used.end) return id;
  int const* const word = static_cast<int const*>(x.ids) + (slot << x.ids_are_int64);
  id.low = word[0];
  if (x.ids_are_int64) id.high = word[1];
  return id;
}

// Exclusive scan over the warps of each expert's counts; writes the totals to `count`.
__device__ inline void add_up_warps(int experts, int* next, int* count) {
#pragma unroll 1
  for (int e = threadIdx.x; e < experts; e += kSortThreads) {
    int rows[kSortWarps], before = 0;
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) rows[w] = next[w * experts + e];
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) {
      next[w * experts + e] = before;
      before += rows[w];
    }
    count[e] = before;
  }
}

// An expert's rows, and those among them that come before the block's slots.
struct ExpertRows {
  int total = 0, earlier = 0;
};

// Writes to first_row, (E), the first row of each expert's slots in this block, and returns the
// total number of rows. rows_of(e): the rows of an expert. The first block also writes the offsets.
template <class RowsOf>
__device__ inline int find_first_rows(Sort const& x, RowsOf&& rows_of, int* first_row) {
  __shared__ int warp_sum[kSortWarps];
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = int(x.experts);
  bool const first_block = blockIdx.x == 0 && blockIdx.y == 0;
  int carry = 0;
#pragma unroll 1
  for (int base = 0; base < experts; base += kSortThreads) {
    int const e = base + int(threadIdx.x);
    ExpertRows const rows = e < experts ? rows_of(e) : ExpertRows{};
    int const inclusive = warp_scan(rows.total);
    if (lane == 31) warp_sum[warp] = inclusive;
    __syncthreads();
    int const sums = warp_scan(lane < kSortWarps ? warp_sum[lane] : 0);
    int const before_warp = __shfl_sync(~0u, sums, max(warp - 1, 0));
    int const first = carry + (warp == 0 ? 0 : before_warp) + inclusive - rows.total;
    carry += __shfl_sync(~0u, sums, kSortWarps - 1);
    if (e < experts) first_row[e] = first + rows.earlier;
    if (e < experts && first_block) x.offsets[e] = first;
    __syncthreads();
  }
  if (threadIdx.x == 0 && first_block) x.offsets[experts] = carry;
  return carry;
}

// row: the slot's, or -1; one without room is left out.
__device__ inline void put_slot(Sort const& x, int64_t slot, int row, float score) {
  if (row >= row_count(x)) row = -1;
  x.slot_row[slot] = row;
  if (row < 0) return;
  x.row_token[row] = int(token_of(x.token_offsets, x.tokens, x.top_k, slot));
  if (x.scores != nullptr) static_cast<float*>(x.row_score)[row] = score;
}
__device__ inline void clear_row(Sort const& x, int64_t row) {
  x.row_token[row] = 0;
  if (x.scores != nullptr) static_cast<float*>(x.row_score)[row] = 0;
}

// A slot's id and score; those outside the slots have none.
struct SortedSlot {
  RawId id;
  float score = 0;
};
// Where sort_few_kernel finds the slots: in the arrays of Sort.
struct StoredSlots {
  __device__ SortedSlot load(Sort const& x, int64_t slot) const {
    SortedSlot s{load_id(x, slot, used_slots(x))};
    if (slot < slot_count(x) && x.scores != nullptr) {
      s.score = static_cast<float const*>(x.scores)[slot];
    }
    return s;
  }
};

// The whole sort in one cluster, with kSortThreads slots per block. waits_last: whether the slots
// were complete before the preceding kernel let this one start, so that it need wait for it only at
// the end.
template <class Slots>
__global__ void __launch_bounds__(kSortThreads) sort_few_kernel(Sort x, Slots source,
                                                                bool waits_last) {
  extern __shared__ int memory[];  // (E) rows of the block; (E) its first rows; (kSortWarps, E)
  int const experts = int(x.experts), warp = threadIdx.x / 32, blocks = int(gridDim.x);
  int *const count = memory, *const first_row = memory + experts, *const next = first_row + experts;
#pragma unroll 1
  for (int i = threadIdx.x; i < kSortWarps * experts; i += kSortThreads) next[i] = 0;
  if (!waits_last) wait_for_previous();
  let_next_start();
  int64_t const slot = int64_t(blockIdx.x) * kSortThreads + threadIdx.x, slots = slot_count(x);
  SortedSlot const s = source.load(x, slot);
  __syncthreads();
  int const id = s.id.expert(x);
  unsigned const same = __match_any_sync(~0u, id), lower = (1u << threadIdx.x % 32) - 1;
  if (id >= 0 && (same & lower) == 0) next[warp * experts + id] = __popc(same);
  __syncthreads();
  add_up_warps(experts, next, count);
  cluster_barrier();
  auto const rows_of = [&](int e) {
    ExpertRows rows;
    int of_block[kSortCluster];
#pragma unroll
    for (int r = 0; r < kSortCluster; ++r)
      of_block[r] = r < blocks ? load_from_block(&count[e], r) : 0;
#pragma unroll
    for (int r = 0; r < kSortCluster; ++r) {
      rows.total += of_block[r];
      rows.earlier += r < int(blockIdx.x) ? of_block[r] : 0;
    }
    return rows;
  };
  int const rows = find_first_rows(x, rows_of, first_row);
  if (slot < slots) {
    int const before = id >= 0 ? next[warp * experts + id] + __popc(same & lower) : 0;
    put_slot(x, slot, id >= 0 ? first_row[id] + before : -1, s.score);
    if (slot >= rows && slot < row_count(x)) clear_row(x, slot);
  }
  if (waits_last) wait_for_previous();
  cluster_barrier();  // the other blocks have read `count`
}

// Whether sort_few() can: it has as many threads as there are slots.
inline bool are_few(int64_t slots) { return slots > 0 && slots <= kSortCluster * kSortThreads; }

// x has been checked, and its slots are few.
template <class Slots>
void sort_few(Sort const& x, Slots const& source, bool waits_last, Queue const& queue) {
  auto const bytes = [](int64_t experts) { return int((kSortWarps + 2) * experts * sizeof(int)); };
  static AllowedOn allowed;
  allow_shared_memory(sort_few_kernel<Slots>, bytes(kMostRouted), allowed,
                      "shared memory of sort_by_expert");
  unsigned const blocks = std::bit_ceil(unsigned(ceil_div(slot_count(x), kSortThreads)));
  cuda_check(launch_kernel(sort_few_kernel<Slots>,
                           {.blocks = blocks,
                            .threads = kSortThreads,
                            .bytes = bytes(x.experts),
                            .stream = queue.stream,
                            .cluster = int(blocks),
                            .early = true},
                           x, source, waits_last),
             "launch of sort_by_expert");
}

}  // namespace guild::cuda
