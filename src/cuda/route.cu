// The router: one warp a token, K rounds of the warp's largest candidate.
//
//   candidates   a key and an id in one integer each, sorted falling in every lane
//   rounds       the largest of the lanes' first ones, by two warp-wide maxima (redux.sync): of the
//                keys, then of the ids among equal keys; its lane moves on to its next one
//   weights      the chosen, a lane each, from their logits
//
// Integers make ties and NaN plain: equal keys go to the smaller id, NaN is below every number, so
// any logits give K different ids in range.
#include "check.h"
#include "router.cuh"
#include "shared/merge_sort.h"

namespace guild::cuda {
namespace {

// Which groups may be chosen from, a bit each. key: (E) of this warp's token in shared memory.
__device__ uint32_t best_groups(Router const& router, float const* key, int experts) {
  int const lane = threadIdx.x % 32, size = experts / router.groups;
  uint64_t mine = 0;
  if (lane < router.groups) {
    uint64_t first = 0, second = 0;  // keys alone decide: equal ones have equal sums
    int at = lane % size;            // lanes begin in different banks
    for (int j = 0; j < size; ++j, at = at + 1 < size ? at + 1 : 0) {
      uint64_t const c = candidate(key[lane * size + at], lane * size + at);
      second = c > first ? first : (c > second ? c : second);
      first = c > first ? c : first;
    }
    float const best = key[candidate_id(first)];
    mine = candidate(size > 1 ? best + key[candidate_id(second)] : best, lane);
  }
  int better = 0;
  for (int g = 0; g < router.groups; ++g) better += __shfl_sync(~0u, mine, g) > mine;
  return __ballot_sync(~0u, lane < router.groups && better < router.top_groups);
}

// This lane's candidates in falling order, 0 for experts that may not be chosen. `shared` holds E
// words of this warp.
template <int per_lane>
__device__ void rank(Route const& x, LaneLogits<per_lane> const& logits, GroupOf group_of,
                     uint32_t* shared, uint64_t (&c)[per_lane]) {
  int const lane = threadIdx.x % 32, experts = int(x.experts);
  bool const by_logit = ranked_by_logit(x), softmax = x.router.score == Score::softmax;
  float const* const bias = static_cast<float const*>(x.selection_bias);
  float const shift = softmax && !by_logit ? logits.top() : 0.f;
  float const factor = softmax && !by_logit ? 1.f / logits.sum_of_exp(shift, experts) : 1.f;
  float key[per_lane];
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    int const e = lane + 32 * i;
    key[i] = logits.value[i];
    if (by_logit || e >= experts) continue;
    key[i] = unscaled_weight(x.router.score, key[i], shift) * factor;
    if (bias != nullptr) key[i] += bias[e];
  }
  uint32_t groups = ~0u;
  if (x.router.groups > 1) {
    float* const keys = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      if (lane + 32 * i < experts) keys[lane + 32 * i] = key[i];
    }
    __syncwarp();
    groups = best_groups(x.router, keys, experts);
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    int const e = lane + 32 * i;
    bool const open = e < experts && (groups == ~0u || (groups >> group_of(e) & 1));
    c[i] = open ? candidate(key[i], e) : 0;
  }
  sort_falling(c);
}

// The K best of the warp's sorted candidates into `chosen`, best first.
template <int per_lane>
__device__ void choose(uint64_t (&c)[per_lane], int top_k, uint32_t* chosen) {
  for (int k = 0; k < top_k; ++k) {
    uint32_t const order = uint32_t(c[0] >> 32);
    uint32_t const best = __reduce_max_sync(~0u, order);
    uint32_t const low = __reduce_max_sync(~0u, order == best ? uint32_t(c[0]) : 0u);
    if (order == best && uint32_t(c[0]) == low) {
      chosen[k] = ~low;
#pragma unroll
      for (int i = 0; i + 1 < per_lane; ++i) c[i] = c[i + 1];
      c[per_lane - 1] = 0;
    }
  }
}

// Blocks of a multiprocessor: as many as registers allow; six where a lane holds few experts.
constexpr int blocks_at_once(int per_lane) { return per_lane <= 4 ? 6 : 1; }

template <int per_lane>
__global__ void __launch_bounds__(kRouterThreads, blocks_at_once(per_lane)) route_kernel(
    Route x, int64_t stride, GroupOf group_of) {
  __shared__ uint32_t shared[kRouterWarps][32 * per_lane];
  int64_t const token = token_of_warp();
  int const lane = threadIdx.x % 32, experts = int(x.experts), top_k = int(x.top_k);
  if (token >= x.tokens) return;
  int32_t* const ids = x.ids + token * x.top_k;
  float* const scores = static_cast<float*>(x.scores) + token * x.top_k;
  if (x.token_mask != nullptr && x.token_mask[token] == 0) {
    for (int k = lane; k < top_k; k += 32) ids[k] = -1, scores[k] = 0;
    return;
  }
  float const* const row = static_cast<float const*>(x.logits.data) + token * stride;
  LaneLogits<per_lane> const logits(row, experts);
  uint32_t* const chosen = shared[threadIdx.x / 32];
  uint64_t candidates[per_lane];
  rank(x, logits, group_of, chosen, candidates);
  choose(candidates, top_k, chosen);
  __syncwarp();

  float top = -INFINITY;
  for (int k = lane; k < top_k; k += 32) top = fmaxf(top, row[chosen[k]]);
  Weighing const w = weighing(x.router, logits, experts, warp_max(top), [&](float shift) {
    float sum = 0;
    for (int k = lane; k < top_k; k += 32) {
      sum += unscaled_weight(x.router.score, row[chosen[k]], shift);
    }
    return warp_sum(sum);
  });
  for (int k = lane; k < top_k; k += 32) {
    float const weight = unscaled_weight(x.router.score, row[chosen[k]], w.shift) * w.factor;
    ids[k] = int(chosen[k]);
    scores[k] = weight * x.router.scale;
  }
}

}  // namespace

void route(Route const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  if (x.tokens == 0) return;
  with_lanes(x.experts, [&](auto lanes) {
    route_kernel<lanes.value><<<router_blocks(x.tokens), kRouterThreads, 0, queue.stream>>>(
        x, row_stride(x.logits, x.experts), GroupOf(int(x.experts / x.router.groups)));
  });
  cuda_check(cudaGetLastError(), "launch of route");
}

}  // namespace guild::cuda
