// Which tokens each expert gets when counts are rounded to tiles: thresholds of their keys.
//
// The first part of token rounding; see round.cu.
#pragma once
#include "router.cuh"
#include "shared/rounding.h"
#include "shared/rounding_workspace.h"

namespace guild::cuda {

// The arguments and the work buffer's parts.
struct RoundPlan {
  TokenRounding x;
  int64_t stride, slots;    // of the logits; of the lists
  int* counts;              // (E + 1)
  RoundingTarget* targets;  // (E)
  // (E) x: the key of the last one taken; y: candidates of this key are taken before this token
  uint2* thresholds;
  float2* softmaxes;  // (T) top and sum
  int *lengths, *block_sums;
  uint32_t* keys;  // (E, T)
};

// What ranks a candidate: NaN is 1, below every number; 0 is left to tokens that are none.
__device__ inline uint32_t candidate_key(float logit, float top, float log_sum) {
  return max(order_of(rounding_key(logit, top, log_sum)), 1u);
}

__device__ inline bool is_real(TokenRounding const& x, int64_t token) {
  return unsigned(x.ids[token * x.top_k]) < unsigned(x.experts);
}

template <class S>
__global__ void __launch_bounds__(kRouterThreads) measure_kernel(RoundPlan p, Deal deal) {
  __shared__ int count[S::experts + 1];
  TokenRounding const& x = p.x;
  Seat<S> const seat;
  int const experts = int(x.experts);
  for (int e = threadIdx.x; e <= experts; e += kRouterThreads) count[e] = 0;
  __syncthreads();
  for (int64_t base = int64_t(blockIdx.x) * S::tokens; base < x.tokens;
       base += int64_t(gridDim.x) * S::tokens) {
    int64_t const token = min(base + seat.token_in_block, x.tokens - 1);
    float2 softmax{0.f, 1.f};
    if (x.router.score == Score::softmax) {  // the same in every thread
      LaneLogits<S> const logits(deal, seat,
                                 static_cast<float const*>(x.logits.data) + token * p.stride);
      softmax.x = logits.top();
      softmax.y = logits.sum_of_exp(softmax.x);
    }
    if (base + seat.token_in_block >= x.tokens) continue;  // after the last shuffle of this round
    if (seat.lane == 0) p.softmaxes[token] = softmax;
    if (!is_real(x, token)) continue;
    if (seat.lane == 0) atomicAdd(&count[experts], 1);
    for (int k = seat.lane; k < x.top_k; k += S::lanes) {
      int const id = x.ids[token * x.top_k + k];
      if (unsigned(id) < unsigned(experts)) atomicAdd(&count[id], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += kRouterThreads) {
    if (count[e] != 0) atomicAdd(&p.counts[e], count[e]);
  }
}

// One block, a thread an expert.
__global__ void __launch_bounds__(1024) aim_kernel(RoundPlan p) {
  __shared__ int count[1024];
  TokenRounding const& x = p.x;
  int const e = threadIdx.x;
  count[e] = e < x.experts ? p.counts[e] : 0;
  __syncthreads();
  if (e >= x.experts) return;
  int64_t before = 0;
  for (int i = 0; i < e; ++i) before += count[i];
  uint64_t const seed = x.seed == nullptr ? 0 : uint64_t(*x.seed);
  int64_t const rounded = rounded_count(x.rounding, x.tile, count[e], before, seed, e);
  p.targets[e] = rounding_target(count[e], rounded, p.counts[x.experts]);
}

// 32 tokens x 32 experts, read by token and written by expert.
__global__ void __launch_bounds__(256) keys_kernel(RoundPlan p) {
  __shared__ uint32_t keys[32][33], chosen[32];
  __shared__ float tops[32], log_sums[32];
  __shared__ bool real[32];
  TokenRounding const& x = p.x;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t const first = int64_t(blockIdx.x) * 32;
  int const first_expert = blockIdx.y * 32;
  if (warp == 0) {
    int64_t const token = first + lane;
    uint32_t bits = 0;
    float2 softmax{0.f, 1.f};
    bool const counts = token < x.tokens && is_real(x, token);
    if (counts) {
      softmax = p.softmaxes[token];
      for (int k = 0; k < x.top_k; ++k) {
        int const id = x.ids[token * x.top_k + k];
        if (unsigned(id) < unsigned(x.experts) && unsigned(id - first_expert) < 32u) {
          bits |= 1u << (id - first_expert);
        }
      }
    }
    chosen[lane] = bits;
    real[lane] = counts;
    tops[lane] = softmax.x;
    log_sums[lane] = logf(softmax.y);
  }
  __syncthreads();
  int const expert = first_expert + lane;
  bool const adds = expert < x.experts && p.targets[expert].adds != 0;
  for (int i = warp; i < 32; i += 8) {
    bool const has = chosen[i] >> lane & 1;
    uint32_t key = 0;
    if (real[i] && expert < x.experts && has != adds) {
      float const* const row = static_cast<float const*>(x.logits.data) + (first + i) * p.stride;
      key = candidate_key(row[expert], tops[i], log_sums[i]);
    }
    keys[lane][i] = key;
  }
  __syncthreads();
  for (int i = warp; i < 32; i += 8) {
    if (first_expert + i >= x.experts || first + lane >= x.tokens) continue;
    p.keys[int64_t(first_expert + i) * x.tokens + first + lane] = keys[i][lane];
  }
}

inline constexpr int kSelectThreads = 1024, kSelectAtOnce = 4;

// Where the `wanted` greatest of a histogram end: the bin, how many of it are wanted, and how many
// it has. By the first warp; bin: (256). Aligned, so that it is read at once and nothing beside it.
struct alignas(16) RadixBin {
  int bin, wanted, count;
};
__device__ inline RadixBin find_bin(int const* bins, int wanted) {
  int const lane = threadIdx.x;
  int part = 0;  // of bins 255 - 8 lane down to 248 - 8 lane
  for (int i = 0; i < 8; ++i) part += bins[255 - 8 * lane - i];
  int through = part;
  for (int step = 1; step < 32; step *= 2) {
    int const other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  unsigned const reached = __ballot_sync(~0u, through >= wanted);
  int const at = reached == 0 ? 31 : __ffs(reached) - 1;
  int left = wanted - __shfl_sync(~0u, through - part, at), bin = 255 - 8 * at;
  for (int i = 0; i < 7 && left > bins[bin]; ++i) left -= bins[bin--];
  return {bin, left, bins[bin]};
}

// How many tokens before the end of the `wanted` first ones of this key.
__device__ inline unsigned end_of_ties(uint32_t const* keys, int64_t tokens, uint32_t key,
                                       int wanted) {
  __shared__ int warp_counts[32];
  __shared__ unsigned found;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int before = 0;  // of the rounds so far
  for (int64_t base = 0; base < tokens; base += kSelectThreads) {
    int64_t const token = base + threadIdx.x;
    bool const equal = token < tokens && keys[token] == key;
    unsigned const equals = __ballot_sync(~0u, equal);
    if (lane == 0) warp_counts[warp] = __popc(equals);
    __syncthreads();
    int const mine = warp_counts[lane];
    int const all = __reduce_add_sync(~0u, mine);
    int const earlier = __reduce_add_sync(~0u, lane < warp ? mine : 0);
    int const rank = before + earlier + __popc(equals & ((1u << lane) - 1));
    if (equal && rank == wanted - 1) found = unsigned(token) + 1;
    before += all;
    __syncthreads();
    if (before >= wanted) break;
  }
  return found;
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(RoundPlan p) {
  __shared__ int bins[256];
  __shared__ RadixBin chosen;
  int const expert = blockIdx.x, thread = threadIdx.x;
  int64_t const tokens = p.x.tokens;
  RoundingTarget const target = p.targets[expert];
  if (target.select >= target.candidates || target.select == 0) {  // all or none
    if (thread == 0) p.thresholds[expert] = {target.select == 0 ? ~0u : 0u, 0u};
    return;
  }
  uint32_t const* const keys = p.keys + expert * tokens;
  uint32_t prefix = 0, mask = 0;
  int wanted = target.select;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (thread < 256) bins[thread] = 0;
    __syncthreads();
    for (int64_t base = thread; base - thread < tokens; base += kSelectAtOnce * kSelectThreads) {
      uint32_t key[kSelectAtOnce];
#pragma unroll
      for (int i = 0; i < kSelectAtOnce; ++i) {
        int64_t const token = base + i * kSelectThreads;
        key[i] = token < tokens ? keys[token] : 0;
      }
#pragma unroll
      for (int i = 0; i < kSelectAtOnce; ++i) {
        bool const open = key[i] != 0 && (key[i] & mask) == prefix;
        int const bin = open ? int(key[i] >> shift & 255) : -1;
        unsigned const same = __match_any_sync(~0u, bin);
        if (open && __ffs(same) - 1 == thread % 32) atomicAdd(&bins[bin], __popc(same));
      }
    }
    __syncthreads();
    if (thread < 32) {
      RadixBin const found = find_bin(bins, wanted);
      if (thread == 0) chosen = found;
    }
    __syncthreads();
    prefix |= uint32_t(chosen.bin) << shift;
    mask |= 255u << shift;
    wanted = chosen.wanted;
  }
  unsigned end = unsigned(tokens);
  if (wanted < chosen.count) end = end_of_ties(keys, tokens, prefix, wanted);
  __syncthreads();
  if (thread == 0) p.thresholds[expert] = {prefix, end};
}

inline RoundPlan plan_of(TokenRounding const& x) {
  Carver carver(x.workspace);
  RoundingWorkspace const w = carve_rounding(carver, x.tokens, x.experts);
  return {x,
          row_stride(x.logits, x.experts),
          rounded_slots(x.tokens, x.experts, x.top_k, x.rounding, x.tile),
          static_cast<int*>(w.counts),
          static_cast<RoundingTarget*>(w.targets),
          static_cast<uint2*>(w.thresholds),
          static_cast<float2*>(w.softmaxes),
          static_cast<int*>(w.lengths),
          static_cast<int*>(w.block_sums),
          static_cast<uint32_t*>(w.keys)};
}

// Launches everything up to the thresholds.
inline RoundPlan select_members(TokenRounding const& x, Queue queue) {
  constexpr unsigned kMostBlocks = 512;
  RoundPlan const p = plan_of(x);
  cuda_check(cudaMemsetAsync(p.counts, 0, (x.experts + 1) * sizeof(int), queue.stream),
             "clearing the counts of round_tokens");
  with_shape(x.experts, 1, by_four(x.logits, p.stride), [&](auto shape, Deal const& deal) {
    using S = decltype(shape);
    unsigned const blocks = std::min(router_blocks<S>(x.tokens), kMostBlocks);
    measure_kernel<S><<<blocks, kRouterThreads, 0, queue.stream>>>(p, deal);
  });
  aim_kernel<<<1, 1024, 0, queue.stream>>>(p);
  unsigned const across = unsigned((x.tokens + 31) / 32), down = unsigned((x.experts + 31) / 32);
  keys_kernel<<<dim3(across, down), 256, 0, queue.stream>>>(p);
  select_kernel<<<unsigned(x.experts), kSelectThreads, 0, queue.stream>>>(p);
  return p;
}

}  // namespace guild::cuda
