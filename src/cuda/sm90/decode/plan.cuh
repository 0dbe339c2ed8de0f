// Which experts have rows and where these begin, found by every block for itself: from the offsets
// of a sort, or from the slots' ids, which saves the launch of the sort where slots are few.
#pragma once
#include "cuda/alignment.h"
#include "cuda/sm90/arch/barrier.cuh"
#include "cuda/sm90/arch/dependence.cuh"
#include "cuda/sm90/decode/decode.h"
#include "cuda/warp.cuh"
#include "guild/routing.h"
#include "shared/tiles.h"

namespace guild::cuda::sm90 {

struct PlanArgs {
  Groups groups;  // of the experts' rows; not read where slots are sorted by the block
  Sort sort;      // ids null: the slots are sorted already
  bool writes;    // whether one block writes the sort's outputs
};

// Threads of the block that builds the plan, all of which call its functions together.
inline constexpr int kPlanThreads = 192, kPlanLanes = 32, kPlanWarps = kPlanThreads / kPlanLanes;

// The experts that have rows: groups.
struct Plan {
  int const* end;          // end[0]: where the first group begins; end[g + 1]: where g ends
  uint16_t const* expert;  // of a group
  int const* token;        // of a row, where slots are sorted by the block
  int count;               // groups

  __device__ Groups groups(int rows) const { return {end + 1, count, rows, /*has_start=*/true}; }
};

// Makes the plan, in shared memory.
struct alignas(16) Planner {
  struct OfWarp {
    int end[kPlanLanes + 1], token[kPlanLanes];
    uint16_t expert[kPlanLanes];
  };
  struct OfBlock {
    int ends[kMostSlotsInBlock + 4];
    int token[kMostSlotsInBlock];
    int id[kMostSlotsInBlock];        // of a slot; kNoExpert: out of range
    int first_id[kMostSlotsInBlock];  // of a slot if it is the first of its expert
  };
  union {
    int end[kMostRouted + 1];
    OfBlock sorted;              // where slots are sorted by the block
    OfWarp by_warp[kPlanWarps];  // where each warp sorts them for itself
  };
  uint16_t expert[kMostRouted];
  int row_of[kMostSlotsInBlock];   // of a slot, -1 if its id is out of range
  int count;                       // groups
  int warp_count[kPlanWarps + 1];  // groups among each warp's experts

  // Finds the groups of the experts' rows.
  __device__ Plan find(Groups const& of) {
    int const warp = warp_index(), lane = threadIdx.x % 32;
    int const share = (of.groups + kPlanThreads - 1) / kPlanThreads * 32, first = warp * share;
    int found = 0;
    for (int e = first; e < first + share; e += 32) {
      found += __popc(__ballot_sync(~0u, has_rows(of, e + lane)));
    }
    int before = count_groups(found, warp, lane);
    for (int e = first; e < first + share; e += 32) {
      bool const there = has_rows(of, e + lane);
      unsigned const all = __ballot_sync(~0u, there);
      if (there) {
        int const group = before + __popc(all & ((1u << lane) - 1)), begin = of.start(e + lane);
        expert[group] = uint16_t(e + lane);
        end[group + 1] = of.end(e + lane, begin);
        if (group == 0) end[0] = begin;
      }
      before += __popc(all);
    }
    __syncthreads();
    return {end, expert, nullptr, count};
  }

  // Sorts the slots by expert, in the order of the slots, and finds the groups of the rows.
  __device__ Plan sort(Sort const& x) {
    return x.tokens * x.top_k <= kPlanLanes ? sort_in_warp(x) : sort_in_block(x);
  }

  // The same for up to 32 slots, one a lane. Every warp does this for itself: none waits for
  // another.
  __device__ Plan sort_in_warp(Sort const& x) {
    OfWarp& own = by_warp[warp_index()];
    int const slots = int(x.tokens * x.top_k), lane = threadIdx.x % 32;
    int const mine = lane < slots ? id_of(x, lane) : kNoExpert;
    bool const there = mine != kNoExpert;
    int smaller = 0, before = 0, rows = 0;  // slots of smaller ids; earlier ones of the same; all
#pragma unroll 8
    for (int j = 0; j < slots; ++j) {
      int const other = __shfl_sync(~0u, mine, j);
      smaller += other < mine;
      before += other == mine && j < lane;
      rows += other == mine;
    }
    unsigned const firsts = __ballot_sync(~0u, there && before == 0);
    int group = 0;
#pragma unroll 8
    for (int j = 0; j < slots; ++j) {
      int const other = __shfl_sync(~0u, mine, j);
      group += (firsts >> j & 1) != 0 && other < mine;
    }
    if (threadIdx.x < slots) row_of[lane] = there ? smaller + before : -1;
    if (lane == 0) own.end[0] = 0;
    if (there) own.token[smaller + before] = lane / int(x.top_k);
    if (firsts >> lane & 1) {
      own.expert[group] = uint16_t(mine);
      own.end[group + 1] = smaller + rows;
    }
    __syncwarp();
    return {own.end, own.expert, own.token, __popc(firsts)};
  }

  // Writes what the sort of `x`, which made the plan, is asked for. Called by the first `threads`
  // threads together.
  template <int threads>
  __device__ void store(Sort const& x, Plan const& plan) const {
    named_barrier(1, threads);
    int const slots = int(x.tokens * x.top_k), rows = plan.end[plan.count];
    auto const* const score = static_cast<float const*>(x.scores);
    auto* const row_score = static_cast<float*>(x.row_score);
    for (int i = threadIdx.x; i < slots; i += threads) {
      int const row = row_of[i];
      x.slot_row[i] = row;
      if (row >= 0) {
        x.row_token[row] = i / int(x.top_k);
        if (row_score != nullptr) row_score[row] = score[i];
      }
      if (i >= rows) {  // no slot has this row
        x.row_token[i] = 0;
        if (row_score != nullptr) row_score[i] = 0;
      }
    }
    for (int e = threadIdx.x; e <= x.experts; e += threads) {
      int first = 0;  // the first group of an expert from e on
      for (int step = kMostSlotsInBlock; step > 0; step /= 2) {
        if (first + step <= plan.count && plan.expert[first + step - 1] < e) first += step;
      }
      x.offsets[e] = plan.end[first];
    }
  }

 private:
  static constexpr int kNoExpert = 1 << 30;

  __device__ Plan sort_in_block(Sort const& x) {
    int const slots = int(x.tokens * x.top_k);
    for (int i = threadIdx.x; i < kMostSlotsInBlock; i += kPlanThreads) {
      sorted.id[i] = i < slots ? id_of(x, i) : kNoExpert;
      sorted.first_id[i] = kNoExpert;
    }
    __syncthreads();
    int groups = 0;
    for (int base = 0; base < slots; base += kPlanThreads) {
      int const slot = base + int(threadIdx.x), mine = slot < slots ? sorted.id[slot] : kNoExpert;
      int smaller = 0, before = 0;  // slots of smaller ids; earlier ones of the same
      for_each(sorted.id, slots, [&](int j, int other) {
        smaller += other < mine;
        before += other == mine && j < slot;
      });
      bool const first = mine != kNoExpert && before == 0;
      if (slot < slots) row_of[slot] = mine == kNoExpert ? -1 : smaller + before;
      if (mine != kNoExpert) sorted.token[smaller + before] = slot / int(x.top_k);
      if (first) sorted.first_id[slot] = mine;
      groups += __syncthreads_count(first);
    }
    if (threadIdx.x == 0) count = groups, end[0] = 0;
    for (int slot = threadIdx.x; slot < slots; slot += kPlanThreads) {
      int const mine = sorted.first_id[slot];
      if (mine == kNoExpert) continue;
      int group = 0, rows = 0;
      for_each(sorted.first_id, slots, [&](int, int other) { group += other < mine; });
      for_each(sorted.id, slots, [&](int, int other) { rows += other == mine; });
      expert[group] = uint16_t(mine);
      end[group + 1] = row_of[slot] + rows;
    }
    __syncthreads();
    return {end, expert, sorted.token, count};
  }

  static __device__ bool has_rows(Groups const& of, int e) {
    if (e >= of.groups) return false;
    int const begin = of.start(e);
    return of.end(e, begin) > begin;
  }
  static __device__ int id_of(Sort const& x, int slot) {
    int64_t const e = x.ids_are_int64 ? static_cast<int64_t const*>(x.ids)[slot]
                                      : static_cast<int32_t const*>(x.ids)[slot];
    return e >= 0 && e < x.experts ? int(e) : kNoExpert;
  }
  // Calls f(j, word[j]) for the slots, four at a time; some past the last one as well.
  template <class F>
  static __device__ void for_each(int const* word, int slots, F&& f) {
#pragma unroll 4
    for (int j = 0; j < slots; j += 4) {
      int4 const four = *reinterpret_cast<int4 const*>(word + j);
      f(j, four.x), f(j + 1, four.y), f(j + 2, four.z), f(j + 3, four.w);
    }
  }

  // From the groups of each warp: sets `count`; returns those of the warps before.
  __device__ int count_groups(int found, int warp, int lane) {
    if (lane == 0) warp_count[warp] = found;
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kPlanWarps; ++w) {
      before += w < warp ? warp_count[w] : 0;
      all += warp_count[w];
    }
    if (threadIdx.x == 0) {
      count = all;
      if (all == 0) end[0] = 0;
    }
    return before;
  }
};

}  // namespace guild::cuda::sm90
