// The gradient of the router's weights: one warp a token, one dense write.
//
// With w the weights before scaling, d = scale * dscores and p from the logits again:
//
//   renormalize   dlogit_k = w_k (d_k - sum_j w_j d_j), times 1 - p_k with sigmoid
//   otherwise     softmax: dlogit_e = p_e (d_e - sum_j p_j d_j), for every e
//                 sigmoid: dlogit_k = p_k (1 - p_k) d_k
#include "check.h"
#include "router.cuh"

namespace guild::cuda {
namespace {

// One of the token's choices; outside the experts: weighs nothing.
struct Choice {
  int id;
  float logit, d;  // d: scale * dscore
};

__device__ Choice choice(RouterGradient const& x, float const* row, int64_t token, int k) {
  if (k >= x.top_k) return {-1, -INFINITY, 0.f};
  int const id = x.ids[token * x.top_k + k];
  if (unsigned(id) >= unsigned(x.experts)) return {-1, -INFINITY, 0.f};
  float const dscore = static_cast<float const*>(x.dscores)[token * x.top_k + k];
  return {id, row[id], x.router.scale * dscore};
}

template <int per_lane>
__global__ void __launch_bounds__(kRouterThreads) router_gradient_kernel(RouterGradient x,
                                                                         int64_t stride,
                                                                         int64_t out_stride) {
  int64_t const token = token_of_warp();
  int const lane = threadIdx.x % 32, experts = int(x.experts), top_k = int(x.top_k);
  if (token >= x.tokens) return;
  float const* const row = static_cast<float const*>(x.logits.data) + token * stride;
  LaneLogits<per_lane> const logits(row, experts);
  Score const score = x.router.score;
  bool const softmax = score == Score::softmax, renormalize = x.router.renormalize;

  // Choices are a lane's first one, in registers, and beyond 32 the others, read again.
  Choice const first = choice(x, row, token, lane);
  auto const each = [&](auto&& f) {
    if (first.id >= 0) f(first);
    for (int k = lane + 32; k < top_k; k += 32) {
      if (Choice const c = choice(x, row, token, k); c.id >= 0) f(c);
    }
  };
  float top = -INFINITY;
  each([&](Choice const& c) { top = fmaxf(top, c.logit); });
  Weighing const w = weighing(x.router, logits, experts, warp_max(top), [&](float shift) {
    float sum = 0;
    each([&](Choice const& c) { sum += unscaled_weight(score, c.logit, shift); });
    return warp_sum(sum);
  });
  float dot = 0;  // sum of w * d over the choices
  each([&](Choice const& c) { dot += unscaled_weight(score, c.logit, w.shift) * w.factor * c.d; });
  dot = warp_sum(dot);

  float out[per_lane];
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    out[i] = 0;
    if (softmax && !renormalize) out[i] = -expf(logits.value[i] - w.shift) * w.factor * dot;
  }
  bool any = false;
  for (int base = 0; base < top_k; base += 32) {  // k rising: duplicates add up in one order
    Choice const mine = base == 0 ? first : choice(x, row, token, base + lane);
    any |= mine.id >= 0;
    float const weight = unscaled_weight(score, mine.logit, w.shift) * w.factor;
    float const slope = softmax ? 1.f : unscaled_weight(Score::sigmoid, -mine.logit, 0.f);
    float const term = weight * slope * (renormalize ? mine.d - dot : mine.d);
    for (int k = 0; k < min(32, top_k - base); ++k) {
      int const id = __shfl_sync(~0u, mine.id, k);
      float const add = __shfl_sync(~0u, term, k);
#pragma unroll
      for (int i = 0; i < per_lane; ++i) out[i] += id == lane + 32 * i ? add : 0.f;
    }
  }
  any = __any_sync(~0u, any);
  float* const dlogits = static_cast<float*>(x.dlogits.data) + token * out_stride;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    if (lane + 32 * i < experts) dlogits[lane + 32 * i] = any ? out[i] : 0.f;
  }
}

}  // namespace

void router_gradient(RouterGradient const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  if (x.tokens == 0) return;
  int64_t const out_stride = x.dlogits.stride == 0 ? x.experts : x.dlogits.stride;
  with_lanes(x.experts, [&](auto lanes) {
    router_gradient_kernel<lanes.value>
        <<<router_blocks(x.tokens), kRouterThreads, 0, queue.stream>>>(
            x, row_stride(x.logits, x.experts), out_stride);
  });
  cuda_check(cudaGetLastError(), "launch of router_gradient");
}

}  // namespace guild::cuda
