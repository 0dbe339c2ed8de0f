// What the router's kernels share: one warp a token, its logits in registers.
//
// Experts are dealt to lanes in turn: lane l holds e = l, l + 32, ...; `per_lane` of them, a power
// of two that the launch chooses.
#pragma once
#include <type_traits>

#include "element.cuh"
#include "shared/routing.h"

namespace guild::cuda {

inline constexpr int kRouterWarps = 8;  // tokens of a block
inline constexpr int kRouterThreads = 32 * kRouterWarps;

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ inline int64_t token_of_warp() {
  return blockIdx.x * int64_t(kRouterWarps) + threadIdx.x / 32;
}

// This lane's experts; past the last one: -infinity.
template <int per_lane>
struct LaneLogits {
  float value[per_lane];

  __device__ LaneLogits(float const* logits, int experts) {
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      int const e = threadIdx.x % 32 + 32 * i;
      value[i] = e < experts ? logits[e] : -INFINITY;
    }
  }
  __device__ float top() const {  // of the token
    float largest = -INFINITY;
#pragma unroll
    for (float x : value) largest = fmaxf(largest, x);
    return warp_max(largest);
  }
  __device__ bool any_nan() const {
    bool nan = false;
#pragma unroll
    for (float x : value) nan |= x != x;
    return __any_sync(~0u, nan);
  }
  // Sum of exp(logit - shift) over the token's experts.
  __device__ float sum_of_exp(float shift, int experts) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      if (int(threadIdx.x % 32) + 32 * i < experts) sum += expf(value[i] - shift);
    }
    return warp_sum(sum);
  }
};

// The factor that turns unscaled_weight(score, logit, shift) into p divided as the router says.
struct Weighing {
  float shift, factor;
};

// From the largest logit of the chosen; `sum_of_chosen(shift)` adds up their unscaled weights.
template <int per_lane, class Sum>
__device__ Weighing weighing(Router const& router, LaneLogits<per_lane> const& logits, int experts,
                             float top_of_chosen, Sum&& sum_of_chosen) {
  bool const softmax = router.score == Score::softmax;
  if (!router.renormalize) {
    if (!softmax) return {0.f, 1.f};
    float const shift = logits.top();
    return {shift, 1.f / logits.sum_of_exp(shift, experts)};
  }
  float const shift = softmax ? top_of_chosen : fminf(top_of_chosen, 0.f);
  float const sum = sum_of_chosen(shift);
  return {shift, softmax && logits.any_nan() ? NAN : 1.f / sum};
}

// Calls f with the number of experts a lane holds, rounded up to a power of two.
template <class F>
void with_lanes(int64_t experts, F&& f) {
  require(experts <= 1024, "experts: expected at most 1024 on CUDA, got ", experts);
  if (experts <= 32) return f(std::integral_constant<int, 1>{});
  if (experts <= 64) return f(std::integral_constant<int, 2>{});
  if (experts <= 128) return f(std::integral_constant<int, 4>{});
  if (experts <= 256) return f(std::integral_constant<int, 8>{});
  if (experts <= 512) return f(std::integral_constant<int, 16>{});
  f(std::integral_constant<int, 32>{});
}

inline unsigned router_blocks(int64_t tokens) {
  return unsigned((tokens + kRouterWarps - 1) / kRouterWarps);
}

}  // namespace guild::cuda
