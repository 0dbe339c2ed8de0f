// The router: some lanes of a warp a token, K rounds of the token's largest candidate.
//
//   keys       what ranks an expert: its logit, or p + bias
//   best       a lane's largest four keys, falling, as integers
//   rounds     the largest of the lanes' first ones; its lane moves on to its next one, and all
//              lanes look for four more where it has run out
//   weights    the chosen, a lane each, from their logits
//
// Integers make ties and NaN plain: NaN is below every number and equal keys go to the lowest lane,
// which has the smaller ids, so any logits give K different ids in range.
#include "arch/copy.cuh"
#include "check.h"
#include "router.cuh"
#include "shared/merge_sort.h"

namespace guild::cuda {
namespace {

// p of this lane's experts plus their biases.
template <class S>
__device__ void keys_of_p(Route const& x, LaneLogits<S> const& logits, float (&key)[S::per_lane]) {
  bool const softmax = x.router.score == Score::softmax;
  float const shift = softmax ? logits.top() : 0.f;
  float const factor = softmax ? 1.f / logits.sum_of_exp(shift) : 1.f;
  float const* const bias = static_cast<float const*>(x.selection_bias);
#pragma unroll
  for (int i = 0; i < S::per_lane; ++i) {
    key[i] = softmax ? expf(logits.value[i] - shift) * factor
                     : unscaled_weight(Score::sigmoid, logits.value[i], 0.f);
    if (bias != nullptr && i < logits.count) key[i] += bias[logits.first + i];
  }
}

// A lane's best experts below `limit`, falling.
template <class S>
struct Best {
  static constexpr int kept = S::per_lane < 4 ? S::per_lane : 4;
  static constexpr bool all = kept == S::per_lane;  // nothing is left out
  uint32_t order[kept];                             // of their keys; 0: none
  uint32_t places;                                  // a byte each: which of the lane's experts

  __device__ void find(float const (&key)[S::per_lane], int count, uint64_t limit) {
    uint64_t best[kept], next[kept];
#pragma unroll
    for (int base = 0; base < S::per_lane; base += kept) {
#pragma unroll
      for (int i = 0; i < kept; ++i) {
        uint64_t const c = candidate(key[base + i], base + i);
        bool const open = base + i < count && (all || c < limit);
        next[i] = open ? c : uint32_t(c);  // of order 0: below every expert
      }
      sort_falling(next);
      if constexpr (!all) {
        if (base > 0) {
          keep_greatest(best, next);
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kept; ++i) best[i] = next[i];
    }
    places = 0;
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      order[i] = uint32_t(best[i] >> 32);
      places |= (~uint32_t(best[i]) & 255) << 8 * i;
    }
  }
  __device__ int place() const { return int(places & 255); }
  __device__ uint64_t front() const { return uint64_t(order[0]) << 32 | uint32_t(~place()); }
  __device__ void pop(bool wins) {
#pragma unroll
    for (int i = 0; i + 1 < kept; ++i) order[i] = wins ? order[i + 1] : order[i];
    order[kept - 1] = wins ? 0 : order[kept - 1];
    places >>= wins ? 8 : 0;
  }
  __device__ void clear() {
#pragma unroll
    for (uint32_t& o : order) o = 0;
  }
};

// Whether this lane's group is among the best, by the sum of its two largest keys.
template <class S>
__device__ bool open_group(Router const& router, Deal const& deal, Seat<S> const& seat,
                           Best<S> const& best) {
  uint32_t first = best.order[0], second = S::per_lane > 1 ? best.order[S::per_lane > 1] : 0;
  for (int step = (1 << deal.log_lanes) / 2; step > 0; step /= 2) {
    uint32_t const other = __shfl_xor_sync(~0u, first, step);
    uint32_t const other_second = __shfl_xor_sync(~0u, second, step);
    second = max(min(first, other), max(second, other_second));
    first = max(first, other);
  }
  int const group = seat.lane >> deal.log_lanes;
  uint32_t const score =
      order_of(deal.part > 1 ? value_of(first) + value_of(second) : value_of(first));
  int better = 0;
  for (int g = 0; g < router.groups; ++g) {
    uint32_t const other = __shfl_sync(~0u, score, g << deal.log_lanes, S::lanes);
    better += other > score || (other == score && g < group);
  }
  return group < router.groups && better < router.top_groups;
}

// The ids of the K best into `chosen`, best first. limit: candidates below it are yet to be taken.
template <class S>
__device__ void choose(Route const& x, Deal const& deal, Seat<S> const& seat,
                       LaneLogits<S> const& logits, float const (&key)[S::per_lane],
                       uint32_t* chosen) {
  unsigned const below = seat.below();
  int const top_k = int(x.top_k);
  uint32_t const place_of_chosen = kept(shared_address(chosen));
  uint64_t limit = ~uint64_t(0);
  int k = 0;
  do {
    Best<S> best;
    best.find(key, logits.count, limit);
    if (k == 0 && x.router.groups > 1 && !open_group(x.router, deal, seat, best)) best.clear();
    uint32_t top = 0;
    bool emptied = false, ran_out = false;
    for (; k < top_k && !ran_out; ++k) {
      top = lanes_max<S>(best.order[0]);
      bool const equal = best.order[0] == top;
      unsigned const equals = __ballot_sync(~0u, equal);
      bool const wins = equal && (equals & below) == 0;
      if (wins) store_shared(place_of_chosen + 4 * k, uint32_t(logits.first + best.place()));
      best.pop(wins);
      if (!Best<S>::all) {
        emptied = wins && best.order[0] == 0;
        ran_out = __any_sync(~0u, emptied);
      }
    }
    if (best.order[0] != 0) {
      limit = best.front() + 1;
    } else {  // the last one taken was this lane's, or it has none left
      limit = emptied ? uint64_t(top) << 32 | ~(chosen[k - 1] - logits.first) : 0;
    }
  } while (!Best<S>::all && k < top_k);
}

// Weights of the chosen, and both into the outputs. `row`: the token's logits.
template <class S>
__device__ void weigh(Route const& x, Seat<S> const& seat, LaneLogits<S> const& logits,
                      float const* row, uint32_t const* chosen) {
  Router const& router = x.router;
  bool const softmax = router.score == Score::softmax;
  int const top_k = int(x.top_k), lane = seat.lane;
  // A lane's first choice stays in registers; beyond S::lanes, the others are read again.
  int const id = lane < top_k ? int(chosen[lane]) : 0;
  float const logit = lane < top_k ? row[id] : -INFINITY;
  float shift = 0, factor = 1, weight = 0;
  if (router.renormalize) {
    float top = logit;
    if (ranked_by_logit(x)) {  // the first one is the largest
      top = __shfl_sync(~0u, logit, 0, S::lanes);
    } else {
#pragma unroll 1
      for (int k = lane + S::lanes; k < top_k; k += S::lanes) top = fmaxf(top, row[chosen[k]]);
      top = lanes_max<S>(top);
    }
    shift = softmax ? top : fminf(top, 0.f);
  } else if (softmax) {
    shift = logits.top();
    factor = 1.f / logits.sum_of_exp(shift);
  }
  if (lane < top_k) weight = unscaled_weight(router.score, logit, shift);
  if (router.renormalize) {
    float sum = weight;
#pragma unroll 1
    for (int k = lane + S::lanes; k < top_k; k += S::lanes) {
      sum += unscaled_weight(router.score, row[chosen[k]], shift);
    }
    factor = 1.f / lanes_sum<S>(sum);
    if (softmax && logits.any_nan(seat)) factor = NAN;
  }
  if (seat.token >= x.tokens) return;
  bool const real = x.token_mask == nullptr || x.token_mask[seat.token] != 0;
  int32_t* const ids = x.ids + seat.token * top_k;
  float* const scores = static_cast<float*>(x.scores) + seat.token * top_k;
  float* const slopes = static_cast<float*>(x.slopes) + seat.token * top_k;
#pragma unroll 1
  for (int k = lane; k < top_k; k += S::lanes) {
    if (k >= S::lanes) weight = unscaled_weight(router.score, row[chosen[k]], shift);
    ids[k] = real ? int(chosen[k]) : -1;
    scores[k] = real ? weight * factor * router.scale : 0.f;
    if (x.slopes != nullptr) {  // 1 - p without the rounding of p
      slopes[k] = real ? unscaled_weight(Score::sigmoid, -row[chosen[k]], 0.f) : 0.f;
    }
  }
}

// Blocks of a multiprocessor: as many as registers allow.
constexpr int blocks_at_once(int per_lane) {
  return per_lane <= 4 ? 6 : per_lane <= 8 ? 4 : per_lane <= 16 ? 3 : 1;
}

template <class S>
__global__ void __launch_bounds__(kRouterThreads, blocks_at_once(S::per_lane)) route_kernel(
    Route x, int64_t stride, Deal deal) {
  __shared__ uint32_t shared[S::tokens][S::experts];
  Seat<S> const seat;
  if (seat.token - threadIdx.x % 32 / S::lanes >= x.tokens) return;  // the whole warp
  float const* const row =
      static_cast<float const*>(x.logits.data) + min(seat.token, x.tokens - 1) * stride;
  LaneLogits<S> const logits(deal, seat, row);
  uint32_t* const chosen = shared[seat.token_in_block];
  if (ranked_by_logit(x)) {
    choose(x, deal, seat, logits, logits.value, chosen);
  } else {
    float key[S::per_lane];
    keys_of_p(x, logits, key);
    choose(x, deal, seat, logits, key, chosen);
  }
  __syncwarp();
  weigh(x, seat, logits, row, chosen);
}

}  // namespace

void route(Route const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  if (x.tokens == 0) return;
  int64_t const stride = row_stride(x.logits, x.experts);
  with_shape(
      x.experts, x.router.groups, by_four(x.logits, stride), [&](auto shape, Deal const& deal) {
        using S = decltype(shape);
        route_kernel<S>
            <<<router_blocks<S>(x.tokens), kRouterThreads, 0, queue.stream>>>(x, stride, deal);
      });
  cuda_check(cudaGetLastError(), "launch of route");
}

}  // namespace guild::cuda
