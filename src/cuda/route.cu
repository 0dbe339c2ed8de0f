// The router: one warp a token, its logits in registers, K rounds of a warp-wide maximum.
//
// Experts are dealt to lanes in turn: lane l holds e = l, l + 32, ... Equal values go to the
// smaller id; NaN ranks below every number, so any logits give K different ids in range.
#include "check.h"
#include "element.cuh"

namespace guild::cuda {
namespace {

constexpr int kThreads = 128;

struct Candidate {
  float value;
  int id;
};

// Whether a comes before b: greater value, then smaller id; NaN after every number.
__device__ bool before(Candidate a, Candidate b) {
  bool const a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a.value != b.value) return a.value > b.value;
  return a.id < b.id;
}

__device__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// p of every expert of one token, `per_lane` a lane; past the last expert: 0.
template <int per_lane>
__device__ void probabilities(float (&p)[per_lane], float const* logits, int experts, Score score) {
  int const lane = threadIdx.x % 32;
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    int const e = lane + 32 * i;
    p[i] = e < experts ? logits[e] : -INFINITY;
    largest = fmaxf(largest, p[i]);
  }
  if (score == Score::sigmoid) {
#pragma unroll
    for (float& x : p) x = 1.f / (1.f + expf(-x));
    return;
  }
  largest = warp_max(largest);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    p[i] = lane + 32 * i < experts ? expf(p[i] - largest) : 0.f;
    sum += p[i];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (float& x : p) x /= sum;
}

template <int per_lane>
__global__ void __launch_bounds__(kThreads, 2) route_kernel(Route x, int64_t stride) {
  int64_t const token = blockIdx.x * int64_t(kThreads / 32) + threadIdx.x / 32;
  int const lane = threadIdx.x % 32, experts = int(x.experts);
  if (token >= x.tokens) return;
  float const* const bias = static_cast<float const*>(x.selection_bias);
  float p[per_lane];
  probabilities(p, static_cast<float const*>(x.logits.data) + token * stride, experts,
                x.router.score);
  uint32_t taken = 0;  // bit i: this lane's i-th expert is chosen
  float sum = 0, mine = 0;
  for (int k = 0; k < x.top_k; ++k) {
    Candidate best{NAN, INT32_MAX};
    float weight = 0;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      int const e = lane + 32 * i;
      if (e >= experts || (taken >> i & 1)) continue;
      Candidate const c{p[i] + (bias == nullptr ? 0.f : bias[e]), e};
      if (before(c, best)) best = c, weight = p[i];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      Candidate const other{__shfl_xor_sync(~0u, best.value, step),
                            __shfl_xor_sync(~0u, best.id, step)};
      float const other_weight = __shfl_xor_sync(~0u, weight, step);
      if (before(other, best)) best = other, weight = other_weight;
    }
    if (best.id % 32 == lane) taken |= 1u << (best.id / 32);
    sum += weight;
    if (k % 32 == lane) mine = weight;
    if (lane == 0) x.ids[token * x.top_k + k] = best.id;
    // Scores wait for the sum: 32 at a time are kept, earlier ones are final without renormalising.
    if (k % 32 == 31 || k == x.top_k - 1) {
      int const at = k / 32 * 32 + lane;
      if (at <= k) static_cast<float*>(x.scores)[token * x.top_k + at] = mine;
    }
  }
  float const scale = x.router.renormalize ? x.router.scale / sum : x.router.scale;
  for (int k = lane; k < x.top_k; k += 32) {
    static_cast<float*>(x.scores)[token * x.top_k + k] *= scale;
  }
}

// With w = p of the chosen, s = scale w / (sum of w if renormalize): dw, then through p to logits.
template <int per_lane>
__global__ void __launch_bounds__(kThreads, 2) router_gradient_kernel(RouterGradient x,
                                                                      int64_t stride,
                                                                      int64_t out_stride) {
  int64_t const token = blockIdx.x * int64_t(kThreads / 32) + threadIdx.x / 32;
  int const lane = threadIdx.x % 32, experts = int(x.experts);
  if (token >= x.tokens) return;
  float p[per_lane], dp[per_lane];
  probabilities(p, static_cast<float const*>(x.logits.data) + token * stride, experts,
                x.router.score);
  float sum = 0, dot = 0;  // of w, and of w * dscores, over the chosen
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    dp[i] = 0;
    bool chosen = false;
    for (int k = 0; k < x.top_k; ++k) {
      if (x.ids[token * x.top_k + k] != lane + 32 * i) continue;
      dp[i] += static_cast<float const*>(x.dscores)[token * x.top_k + k];
      chosen = true;
    }
    if (!chosen) continue;
    sum += p[i];
    dot += p[i] * dp[i];
  }
  sum = warp_sum(sum);
  dot = warp_sum(dot);
  float inner = 0;  // sum of p * dp: softmax needs it
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    bool chosen = false;
    for (int k = 0; k < x.top_k; ++k) chosen |= x.ids[token * x.top_k + k] == lane + 32 * i;
    if (chosen) {
      dp[i] = x.router.renormalize ? x.router.scale / sum * (dp[i] - dot / sum)
                                   : x.router.scale * dp[i];
    }
    inner += p[i] * dp[i];
  }
  inner = warp_sum(inner);
  bool const softmax = x.router.score == Score::softmax;
  float* const out = static_cast<float*>(x.dlogits.data) + token * out_stride;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    float const d = softmax ? p[i] * (dp[i] - inner) : dp[i] * p[i] * (1.f - p[i]);
    if (lane + 32 * i < experts) out[lane + 32 * i] = d;
  }
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

unsigned blocks_for(int64_t tokens) {
  return unsigned((tokens + kThreads / 32 - 1) / (kThreads / 32));
}

}  // namespace

void route(Route const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  if (x.tokens == 0) return;
  with_lanes(x.experts, [&](auto lanes) {
    route_kernel<lanes.value>
        <<<blocks_for(x.tokens), kThreads, 0, queue.stream>>>(x, row_stride(x.logits, x.experts));
  });
  cuda_check(cudaGetLastError(), "launch of route");
}

void router_gradient(RouterGradient const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  if (x.tokens == 0) return;
  int64_t const out_stride = x.dlogits.stride == 0 ? x.experts : x.dlogits.stride;
  with_lanes(x.experts, [&](auto lanes) {
    router_gradient_kernel<lanes.value><<<blocks_for(x.tokens), kThreads, 0, queue.stream>>>(
        x, row_stride(x.logits, x.experts), out_stride);
  });
  cuda_check(cudaGetLastError(), "launch of router_gradient");
}

}  // namespace guild::cuda
