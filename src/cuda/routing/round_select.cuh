// The first part of token rounding (round.cu): which tokens each expert gets.
#pragma once
#include "cuda/routing/round_radix.cuh"
#include "cuda/routing/router.cuh"
#include "shared/rounding.h"
#include "shared/rounding_workspace.h"

namespace guild::cuda {

// The arguments and the parts of the workspace.
struct RoundPlan {
  TokenRounding x;
  int64_t stride, slots, blocks;  // of the logits; of all lists; of kListTokens each
  int *counts, *block_sums;       // (E + 1), (blocks): contiguous
  RoundingTarget* targets;        // (E)
  float2* softmaxes;              // (T) top and sum
  uint32_t* members;              // (blocks, E) one bit per token
  uint32_t* keys;                 // (E, T)
};

// The key by which an expert ranks a candidate, between kNever and kAlways; 1 for NaN.
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
    // Only after the last shuffle, which needs the whole warp.
    if (base + seat.token_in_block >= x.tokens) continue;
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

// The targets of 32 experts, one in each lane.
__device__ inline RoundingTarget target_of_lane(RoundPlan const& p, int first_expert) {
  TokenRounding const& x = p.x;
  int const lane = threadIdx.x % 32, expert = first_expert + lane;
  int const count = expert < x.experts ? p.counts[expert] : 0;
  int before = 0;
  if (x.rounding == Rounding::balanced) {
    for (int e = lane; e < first_expert; e += 32) before += p.counts[e];
    before = __reduce_add_sync(~0u, before);
    before += warp_scan(count) - count;
  }
  uint64_t const seed = x.seed == nullptr ? 0 : uint64_t(*x.seed);
  return rounding_target(count, rounded_count(x.rounding, x.tile, count, before, seed, expert),
                         p.counts[x.experts]);
}

// Tokens and threads of a block of keys_kernel, which has 32 experts.
inline constexpr int kKeyTokens = 64, kKeyThreads = 256;

// Writes the keys of the block: reads logits by token, writes keys by expert.
__global__ void __launch_bounds__(kKeyThreads) keys_kernel(RoundPlan p) {
  constexpr int kWarps = kKeyThreads / 32, kEach = kKeyTokens / kWarps;
  __shared__ uint32_t keys[32][kKeyTokens + 1], chosen[kKeyTokens], adding;
  __shared__ float2 softmaxes[kKeyTokens];
  __shared__ bool is_token[kKeyTokens];  // not padding
  TokenRounding const& x = p.x;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t const first = int64_t(blockIdx.x) * kKeyTokens;
  int const first_expert = blockIdx.y * 32, expert = first_expert + lane;
  float logits[kEach];  // loads are issued before anything waits
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int64_t const token = first + i * kWarps + warp;
    bool const there = token < x.tokens && expert < x.experts;
    logits[i] = there ? static_cast<float const*>(x.logits.data)[token * p.stride + expert] : 0.f;
  }
  if (warp < kKeyTokens / 32) {
    int const place = warp * 32 + lane;
    int64_t const token = first + place;
    uint32_t bits = 0;
    bool const real = token < x.tokens && is_real(x, token);
    float2 const softmax = real ? p.softmaxes[token] : float2{0.f, 1.f};
    for (int k = 0; real && k < x.top_k; ++k) {
      int const id = x.ids[token * x.top_k + k];
      if (unsigned(id) < unsigned(x.experts) && unsigned(id - first_expert) < 32u) {
        bits |= 1u << (id - first_expert);
      }
    }
    chosen[place] = bits;
    is_token[place] = real;
    softmaxes[place] = {softmax.x, logf(softmax.y)};
  } else if (warp == kKeyTokens / 32) {
    RoundingTarget const target = target_of_lane(p, first_expert);
    unsigned const adds = __ballot_sync(~0u, target.adds != 0);
    if (lane == 0) adding = adds;
    if (blockIdx.x == 0 && expert < x.experts) p.targets[expert] = target;
  }
  __syncthreads();
  bool const adds = adding >> lane & 1;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int const place = i * kWarps + warp;
    bool const has = chosen[place] >> lane & 1;
    float2 const softmax = softmaxes[place];
    uint32_t const key = candidate_key(logits[i], softmax.x, softmax.y);
    keys[lane][place] = !is_token[place] ? kNever : has != adds ? key : has ? kAlways : kNever;
  }
  __syncthreads();
  for (int i = warp; i < 32; i += kWarps) {
    if (first_expert + i >= x.experts) continue;
    for (int place = lane; place < kKeyTokens && first + place < x.tokens; place += 32) {
      p.keys[int64_t(first_expert + i) * x.tokens + first + place] = keys[i][place];
    }
  }
}

// One block per expert: which tokens it gets, one bit each.
__global__ void __launch_bounds__(kSelectThreads, 2) select_kernel(RoundPlan p) {
  int const expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const tokens = int(p.x.tokens);
  uint32_t const* const keys = p.keys + int64_t(expert) * tokens;
  RoundingTarget const target = p.targets[expert];
  Threshold threshold{kNever, 0};
  if (target.select == 0) {
    threshold.key = kAlways - 1;
  } else if (target.select < target.candidates) {
    threshold = find_threshold(keys, tokens, target.select);
  }
  constexpr int kWords = 8;  // per warp at a time; consecutive, so that the atomics below are too
  for (int base = warp * 32 * kWords; base < tokens; base += kSelectThreads * kWords) {
    uint32_t key[kWords], mine = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      int const token = base + i * 32 + lane;
      key[i] = token < tokens ? keys[token] : kNever;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t const word = __ballot_sync(~0u, threshold.passes(key[i], base + i * 32 + lane));
      if (lane == i) mine = word;
    }
    int64_t const block = base / 32 + lane;
    if (lane >= kWords || block >= p.blocks) continue;
    p.members[block * p.x.experts + expert] = mine;
    if (mine != 0) atomicAdd(&p.block_sums[block], __popc(mine));
  }
}

inline RoundPlan plan_of(TokenRounding const& x) {
  Carver carver(x.workspace);
  RoundingWorkspace const w = carve_rounding(carver, x.tokens, x.experts);
  int* const counts = static_cast<int*>(w.counts);
  return {.x = x,
          .stride = row_stride(x.logits, x.experts),
          .slots = rounded_slots(x.tokens, x.experts, x.top_k, x.rounding, x.tile),
          .blocks = ceil_div(x.tokens, kListTokens),
          .counts = counts,
          .block_sums = counts + x.experts + 1,
          .targets = static_cast<RoundingTarget*>(w.targets),
          .softmaxes = static_cast<float2*>(w.softmaxes),
          .members = static_cast<uint32_t*>(w.members),
          .keys = static_cast<uint32_t*>(w.keys)};
}

// Launches all kernels up to select_kernel().
inline RoundPlan select_members(TokenRounding const& x, Queue queue) {
  constexpr unsigned kMostBlocks = 1024;
  RoundPlan const p = plan_of(x);
  cuda_check(cudaMemsetAsync(p.counts, 0, (x.experts + 1 + p.blocks) * sizeof(int), queue.stream),
             "clearing the counts of round_tokens");
  with_shape(x.experts, 1, by_four(x.logits, p.stride), [&](auto shape, Deal const& deal) {
    using S = decltype(shape);
    unsigned const blocks = std::min(router_blocks<S>(x.tokens), kMostBlocks);
    measure_kernel<S><<<blocks, kRouterThreads, 0, queue.stream>>>(p, deal);
  });
  unsigned const across = unsigned(ceil_div(x.tokens, kKeyTokens));
  unsigned const down = unsigned(ceil_div(x.experts, 32));
  keys_kernel<<<dim3(across, down), kKeyThreads, 0, queue.stream>>>(p);
  select_kernel<<<unsigned(x.experts), kSelectThreads, 0, queue.stream>>>(p);
  return p;
}

}  // namespace guild::cuda
