// The plan: which experts have rows, and where these begin. Every block finds it by itself, from a
// sort's offsets or, where slots are few, from their ids, which saves the launch of a sort.
#pragma once
#include "cuda/alignment.h"
#include "cuda/arch/barrier.cuh"
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

// What a block makes its plan from, if known at compile time. A kernel that handles fewer cases is
// shorter, which matters because between layers all of its instructions are fetched from memory
// again (docs/measured/few_tokens.md).
enum class PlanFrom {
  any,             // offsets or slots
  offsets,         // of a sort
  slots,           // kMostSlotsInBlock at most
  few_slots,       // kMostSlotsInWarp at most
  softmax_choice,  // of a single token's experts, by Ranking::softmax
  choice,          // the same by any ranking
};
constexpr bool chooses(PlanFrom from) { return from >= PlanFrom::softmax_choice; }

// Threads of the block that builds the plan, all of which call its functions together.
inline constexpr int kPlanThreads = 192, kPlanLanes = 32, kPlanWarps = kPlanThreads / kPlanLanes;
// Up to this many slots, every warp sorts by itself, by comparing all pairs.
inline constexpr int kMostSlotsInWarp = 16;

// The experts that have rows: groups.
struct Plan {
  int const* end;          // end[0]: where the first group begins; end[g + 1]: where g ends
  uint16_t const* expert;  // of a group
  int const* token;        // of a row, where slots are sorted by the block
  int count;               // groups
  bool flat = false;       // no group has more than eight rows

  __device__ Groups groups(int rows) const { return {end + 1, count, rows, /*has_start=*/true}; }
};

// Makes the plan, in shared memory.
struct alignas(16) Planner {
  struct OfWarp {
    int end[kPlanLanes + 1], token[kPlanLanes];
    uint16_t expert[kPlanLanes];
  };
  struct OfBlock {
    uint16_t expert[kMostSlotsInBlock];
    int end[kMostSlotsInBlock + 1], token[kMostSlotsInBlock];
  };
  union {
    int end[kMostRouted + 1];
    OfWarp by_warp[kPlanWarps];  // where each warp sorts the slots for itself
    // Where the block sorts them: for each expert, one byte for each of the four warps that have
    // slots. It counts the warp's slots of that expert, then becomes the first row of these.
    unsigned bytes[kMostRouted];
  };
  union {
    uint16_t expert[kMostRouted];
    OfBlock sorted;
  };
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
    return x.tokens * x.top_k > kMostSlotsInWarp ? sort_in_block(x) : sort_few(x);
  }
  __device__ Plan sort_few(Sort const& x) {
    int const lane = threadIdx.x % 32;
    return sort_in_warp(x, lane < x.tokens * x.top_k ? id_of(x, lane) : kNoExpert);
  }
  static constexpr int kNoExpert = 1 << 30;

  // The same for up to 16 slots, one per lane; `mine` is the expert of the lane's slot. Every warp
  // does this for itself, so none waits for another.
  __device__ Plan sort_in_warp(Sort const& x, int mine) {
    OfWarp& own = by_warp[warp_index()];
    int const slots = int(x.tokens * x.top_k), lane = threadIdx.x % 32;
    bool const there = mine != kNoExpert;
    // Among the slots of the same expert: earlier ones, and all. Then: slots of smaller ids.
    unsigned const same = __match_any_sync(~0u, mine);
    int const before = __popc(same & ((1u << lane) - 1)), rows = __popc(same);
    int smaller = 0;
    auto const compare_eight = [&](int from) {
#pragma unroll
      for (int j = 0; j < 8; ++j) smaller += __shfl_sync(~0u, mine, from + j) < mine;
    };
    compare_eight(0);
    if (slots > 8) compare_eight(8);
    unsigned const firsts = __ballot_sync(~0u, there && before == 0);
    int group = smaller;
    if (__any_sync(~0u, there && before > 0)) {
      group = 0;
#pragma unroll 1
      for (int j = 0; j < slots; ++j) {
        int const other = __shfl_sync(~0u, mine, j);
        group += (firsts >> j & 1) != 0 && other < mine;
      }
    }
    if (threadIdx.x < slots) row_of[lane] = there ? smaller + before : -1;
    if (lane == 0) own.end[0] = 0;
    // lane / top_k without an integer division. The half keeps quotients away from whole numbers.
    if (there) own.token[smaller + before] = int(__fdividef(lane + 0.5f, float(int(x.top_k))));
    if (firsts >> lane & 1) {
      own.expert[group] = uint16_t(mine);
      own.end[group + 1] = smaller + rows;
    }
    __syncwarp();
    return {own.end, own.expert, own.token, __popc(firsts), !__any_sync(~0u, there && rows > 8)};
  }

  // Writes the outputs of the sort of `x`, from which the plan was made. Called by the first
  // `threads` threads together.
  template <int threads>
  __device__ void store(Sort const& x, Plan const& plan) const {
    named_barrier(1, threads);
    int const slots = int(x.tokens * x.top_k), rows = plan.end[plan.count];
    auto const* const score = static_cast<float const*>(x.scores);
    auto* const row_score = static_cast<float*>(x.row_score);
#pragma unroll 1
    for (int i = threadIdx.x; i < slots; i += threads) {
      int const row = row_of[i];
      x.slot_row[i] = row;
      if (row >= 0) {
        x.row_token[row] = i / int(x.top_k);
        if (score != nullptr) row_score[row] = score[i];
      }
      if (i >= rows) {  // no slot has this row
        x.row_token[i] = 0;
        if (score != nullptr) row_score[i] = 0;
      }
    }
#pragma unroll 1
    for (int e = threadIdx.x; e <= x.experts; e += threads) {
      int first = 0;  // the first group of an expert from e on
#pragma unroll 1
      for (int step = kMostSlotsInBlock; step > 0; step /= 2) {
        if (first + step <= plan.count && plan.expert[first + step - 1] < e) first += step;
      }
      x.offsets[e] = plan.end[first];
    }
  }

  // Counting sort of up to kMostSlotsInBlock slots: counts each expert's slots per warp, in one
  // byte for each warp, so that ranks are stable, then scans over the experts.
  __device__ Plan sort_in_block(Sort const& x) {
    int const slots = int(x.tokens * x.top_k), experts = int(x.experts), slot = threadIdx.x;
    int const warp = warp_index(), lane = threadIdx.x % 32;
    int const mine = slot < slots ? id_of(x, slot) : kNoExpert;
    for (int e = threadIdx.x; e < experts; e += kPlanThreads) bytes[e] = 0;
    __syncthreads();
    unsigned const same = __match_any_sync(~0u, mine), earlier = same & ((1u << lane) - 1);
    if (mine != kNoExpert && earlier == 0) {
      reinterpret_cast<uint8_t*>(&bytes[mine])[warp] = uint8_t(__popc(same));
    }
    __syncthreads();
    bool const high = find_starts(experts, warp, lane);
    if (slot < slots) {
      int row = -1;
      if (mine != kNoExpert) {
        row = int(bytes[mine] >> 8 * warp & 255) + __popc(earlier);
        sorted.token[row] = slot / int(x.top_k);
      }
      row_of[slot] = row;
    }
    bool const flat = __syncthreads_or(high) == 0;
    return {sorted.end, sorted.expert, sorted.token, count, flat};
  }

 private:
  // Finds the first rows and the groups from the counts. Returns whether one of the thread's
  // experts has more than eight rows.
  __device__ bool find_starts(int experts, int warp, int lane) {
    int const share = (experts + kPlanThreads - 1) / kPlanThreads;
    int const first = threadIdx.x * share, last = min(experts, first + share);
    int own = 0;  // rows, and groups in the upper half
    for (int e = first; e < last; ++e) own += counted(e);
    int const through = warp_scan(own);
    if (lane == 31) warp_count[warp] = through;
    __syncthreads();
    int before = through - own, all = 0;
#pragma unroll
    for (int w = 0; w < kPlanWarps; ++w) {
      before += w < warp ? warp_count[w] : 0;
      all += warp_count[w];
    }
    bool high = false;
    for (int e = first; e < last; ++e) {
      int const here = counted(e), row = before & 0xffff, group = before >> 16;
      bytes[e] = bytes[e] * 0x01010100u + unsigned(row) * 0x01010101u;
      if (here != 0) {
        sorted.expert[group] = uint16_t(e);
        sorted.end[group + 1] = row + (here & 0xffff);
      }
      before += here;
      high |= (here & 0xffff) > 8;
    }
    if (threadIdx.x == 0) count = all >> 16, sorted.end[0] = 0;
    __syncthreads();
    return high;
  }
  __device__ int counted(int e) const {
    int const rows = int(__dp4a(bytes[e], 0x01010101u, 0u));
    return rows == 0 ? 0 : rows + (1 << 16);
  }

  static __device__ bool has_rows(Groups const& of, int e) {
    if (e >= of.groups) return false;
    int const begin = of.start(e);
    return of.end(e, begin) > begin;
  }
  // Loads from L2: the preceding kernel may have written it while this one was already running.
  static __device__ int id_of(Sort const& x, int slot) {
    int64_t const e = x.ids_are_int64 ? __ldcg(static_cast<long long const*>(x.ids) + slot)
                                      : __ldcg(static_cast<int32_t const*>(x.ids) + slot);
    return e >= 0 && e < x.experts ? int(e) : kNoExpert;
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
