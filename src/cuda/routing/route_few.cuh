// The router of a few tokens, from a product in parts: a block a token, with the results of
// route.cuh bit for bit. Between layers no instruction is cached, and fetching them takes longer
// than running them: so loops stay rolled, and the whole is short.
//
//   all warps   logits, and as integers the keys that experts are ranked by; groups that are closed
//               get keys of 0
//   warp 0      no choice is below the K-th of the lanes' largest keys. Usually a few keys are not,
//               at most one a lane: their ranks are counted. Else K times the largest is taken
#pragma once
#include "cuda/routing/logit_parts.cuh"
#include "cuda/routing/route.cuh"
#include "shared/router_product.h"

namespace guild::cuda {

// Up to so many tokens; a lane has a choice and its weight. With fewer experts route.cu's kernels
// are faster.
inline constexpr int64_t kMostBlocksOfToken = 256, kMostChoices = 16, kFewExperts = 256;

struct RouteOfToken {
  static constexpr int kMostExperts = int(kMostSplitExperts), kMostGroups = 32;

  float logit[kMostExperts];
  uint32_t order[kMostExperts];  // of keys; 0: none
  uint32_t group[kMostGroups];   // of groups' scores
  uint32_t chosen[kMostChoices], key[kMostChoices];
  uint32_t candidate[32], candidate_key[32];

  static __device__ int lane() { return int(threadIdx.x) % 32; }

  // Of an expert a thread, and zeros up to a multiple of 32. Whether a logit is NaN.
  __device__ bool find_keys(Route const& x, LogitParts const& parts, int experts) {
    int const e = threadIdx.x;
    float sum = 0;
    if (e < experts) {
      auto const* const bias = static_cast<float const*>(x.selection_bias);
      float const of_bias = bias == nullptr ? 0.f : bias[e];
      logit[e] = sum = parts.sum(blockIdx.x * int64_t(experts) + e);
      order[e] = order_of(ranked_by_logit(x) ? sum : plain_key(x, sum, of_bias));
    } else {
      order[e] = 0;
    }
    return __syncthreads_or(sum != sum) != 0;
  }

  // Takes the keys of groups that are not among the best, by their largest key or two.
  __device__ void close_groups(Router const& router, int part) {
    int const warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
    bool const two = router.group_score == GroupScore::top2_sum && part > 1;
#pragma unroll 1
    for (int g = warp; g < router.groups; g += warps) {
      uint32_t first = 0, second = 0;
#pragma unroll 1
      for (int i = lane(); i < part; i += 32) {
        uint32_t const next = order[g * part + i];
        second = max(second, min(first, next));
        first = max(first, next);
      }
#pragma unroll 1
      for (int step = 16; step > 0; step /= 2) {
        uint32_t const other = __shfl_xor_sync(~0u, first, step);
        uint32_t const other_second = __shfl_xor_sync(~0u, second, step);
        second = max(min(first, other), max(second, other_second));
        first = max(first, other);
      }
      if (lane() == 0) group[g] = two ? order_of(value_of(first) + value_of(second)) : first;
    }
    __syncthreads();
#pragma unroll 1
    for (int g = warp; g < router.groups; g += warps) {
      uint32_t const own = group[g], other = lane() < router.groups ? group[lane()] : 0;
      bool const better = other > own || (other == own && lane() < g);
      if (__popc(__ballot_sync(~0u, better && lane() < router.groups)) < router.top_groups)
        continue;
#pragma unroll 1
      for (int i = lane(); i < part; i += 32) order[g * part + i] = 0;
    }
    __syncthreads();
  }

  // How many lanes have a larger value than this one, or an equal one and come before.
  static __device__ int rank_of(uint32_t value) {
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < 32; ++j) {
      uint32_t const other = __shfl_sync(~0u, value, j);
      rank += other > value || (other == value && j < lane());
    }
    return rank;
  }

  // The best `top_k`, in order, to chosen and key. Warp 0.
  __device__ void choose(int experts, int top_k) {
    uint32_t largest = 0;
#pragma unroll 4
    for (int e = lane(); e < experts; e += 32) largest = max(largest, order[e]);
    unsigned const last = __ballot_sync(~0u, rank_of(largest) == top_k - 1);
    uint32_t const least = __shfl_sync(~0u, largest, __ffs(int(last)) - 1);
    int found = 0;
#pragma unroll 2
    for (int first = 0; first < experts; first += 32) {
      uint32_t const own = order[first + lane()];
      bool const stays = own != 0 && own >= least;
      unsigned const all = __ballot_sync(~0u, stays);
      int const at = found + __popc(all & ((1u << lane()) - 1));
      if (stays && at < 32) candidate[at] = unsigned(first + lane()), candidate_key[at] = own;
      found += __popc(all);
    }
    __syncwarp();
    if (found > 32) return choose_one_by_one(experts, top_k);
    uint32_t const own = lane() < found ? candidate_key[lane()] : 0;
    int const rank = rank_of(own);
    if (rank < top_k) chosen[rank] = candidate[lane()], key[rank] = own;
    __syncwarp();
  }

  // The same where many keys are alike.
  __device__ void choose_one_by_one(int experts, int top_k) {
#pragma unroll 1
    for (int k = 0; k < top_k; ++k) {
      uint32_t largest = 0;
      unsigned place = 0;
#pragma unroll 1
      for (int e = lane(); e < experts; e += 32) {
        if (order[e] > largest) largest = order[e], place = unsigned(e);
      }
      uint32_t const top = __reduce_max_sync(~0u, largest);
      unsigned const first = __reduce_min_sync(~0u, largest == top ? place : ~0u);
      if (lane() == 0) chosen[k] = first, key[k] = top, order[first] = 0;
      __syncwarp();
    }
  }

  // Of the token: its largest logit.
  __device__ float top_logit(int experts) const {
    float largest = -INFINITY;
#pragma unroll 1
    for (int e = lane(); e < experts; e += 32) largest = fmaxf(largest, logit[e]);
    return lanes_max<TokenShape<32, 2>>(largest);
  }
  // LaneLogits::sum_by_neighbours().
  __device__ float sum_by_neighbours(int experts, float shift) const {
    float sum_of_32 = 0;  // of experts 32 * lane and on
#pragma unroll 2
    for (int first = 0; first < experts; first += 32) {
      int const e = first + lane();
      float sum = e < experts ? expf(logit[e] - shift) : 0.f;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane() == first / 32) sum_of_32 = sum;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum_of_32 += __shfl_xor_sync(~0u, sum_of_32, step);
    return sum_of_32;
  }

  // Writes ids and weights of the chosen, one a lane. Warp 0.
  __device__ void write(Route const& x, int experts, bool nan) const {
    Router const& router = x.router;
    bool const softmax = router.score == Score::softmax, there = lane() < x.top_k;
    unsigned const id = there ? chosen[lane()] : 0;
    float value = -INFINITY, shift = 0, factor = 1, weight = 0;
    if (there) value = ranked_by_logit(x) ? value_of(key[lane()]) : logit[id];
    if (weighs_relatively(router)) {
      shift = weight_shift(router.score, ranked_by_logit(x) ? __shfl_sync(~0u, value, 0)
                                                            : lanes_max<TokenShape<32, 2>>(value));
    } else if (softmax) {
      shift = top_logit(experts);
      factor = 1.f / sum_by_neighbours(experts, shift);
    }
    if (there) weight = unscaled_weight(router.score, value, shift);
    if (router.renormalize) {
      factor = factor_of_sum(router, lanes_sum<TokenShape<32, 2>>(weight), factor);
      if (softmax && nan) factor = NAN;
    }
    if (!there) return;
    bool const real = x.token_mask == nullptr || x.token_mask[blockIdx.x] != 0;
    int64_t const slot = blockIdx.x * x.top_k + lane();
    x.ids[slot] = real ? int(id) : -1;
    static_cast<float*>(x.scores)[slot] = real ? weight * factor * float(router.scale) : 0.f;
    if (x.slopes == nullptr) return;
    static_cast<float*>(x.slopes)[slot] = real ? weight_slope(router.score, logit[id]) : 0.f;
  }
};

// Softmax over all experts needs every logit before the first key, or sums them in groups.
inline bool serves_few(Route const& x) {
  bool const sized = x.experts > kFewExperts && x.experts <= kMostSplitExperts;
  bool const softmax = x.router.score == Score::softmax;
  bool const simple = ranked_by_logit(x) || !softmax;
  bool const sums = softmax && !weighs_relatively(x.router);
  return sized && x.tokens <= kMostBlocksOfToken && x.top_k <= kMostChoices && simple &&
         x.router.groups <= (sums ? 1 : RouteOfToken::kMostGroups);
}

}  // namespace guild::cuda
