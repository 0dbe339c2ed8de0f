// The gradient of the routing weights: several lanes of a warp per token, one dense write.
//
// With s the scores, ds their gradients and dot = sum of s ds over the choices:
//
//   renormalize   dlogit_k = s_k (ds_k - dot / scale)
//   otherwise     dlogit_k = s_k ds_k and, with softmax, -p_e dot for every e, p from the logits
//
// times the slope d(log p_k) / dlogit_k where p depends on its own logit alone. Weights whose sum
// is below the floor are divided by a constant, so they follow "otherwise".
#include "checks/check.h"
#include "cuda/routing/router.cuh"

namespace guild::cuda {
namespace {

// One of the token's choices; an id that is no expert has weight 0.
struct Choice {
  int id;
  float score, dscore, slope;
};

__device__ Choice choice(RouterGradient const& x, int slot, int end) {
  if (slot >= end) return {-1, 0.f, 0.f, 0.f};
  int const id = x.ids[slot];
  if (unsigned(id) >= unsigned(x.experts)) return {-1, 0.f, 0.f, 0.f};
  float const slope = x.slopes == nullptr ? 1.f : static_cast<float const*>(x.slopes)[slot];
  return {id, static_cast<float const*>(x.scores)[slot], static_cast<float const*>(x.dscores)[slot],
          slope};
}

// Adds the lanes' terms to their experts in `out`: (E) of the token. Equal ids add up in the order
// of lanes.
template <class S>
__device__ void add_terms(Seat<S> const& seat, int id, float term, float* out) {
  int const place = int(threadIdx.x % 32) - seat.lane;
  unsigned const same =
      __match_any_sync(~0u, id < 0 ? -1 - int(threadIdx.x % 32) : place * S::experts + id);
  bool const first = (same & ((1u << threadIdx.x % 32) - 1)) == 0;
  if (!__all_sync(~0u, first)) {
    float total = 0;
#pragma unroll 1
    for (int lane = 0; lane < 32; ++lane) {
      float const other = __shfl_sync(~0u, term, lane);
      if (same >> lane & 1) total += other;
    }
    term = total;
  }
  if (first && id >= 0) out[id] += term;
  __syncwarp();
}

// Whether the sum of p over the token's choices is below the floor. mine, end: the lane's first
// slot, and the end of the token's slots.
template <class S>
__device__ bool is_floored(RouterGradient const& x, Deal const& deal, Seat<S> const& seat,
                           float const* row, int mine, int end) {
  float shift = 0, factor = 1, sum = 0;
  if (x.router.score == Score::softmax) {
    LaneLogits<S> const logits(deal, seat, row);
    shift = logits.top();
    factor = 1.f / logits.sum_of_exp(shift);
  }
#pragma unroll 1
  for (int slot = mine; slot < end; slot += S::lanes) {
    int const id = x.ids[slot];
    if (unsigned(id) >= unsigned(x.experts)) continue;
    sum += unscaled_weight(x.router.score, row[id], shift);
  }
  return lanes_sum<S>(sum) * factor < float(x.router.sum_floor);
}

// Softmax: subtracts p dot for every expert, since p depends on all logits. Subtracts nothing
// unless `wanted`, as p may be NaN. Called by whole warps.
template <class S>
__device__ void subtract_dense(Deal const& deal, Seat<S> const& seat, float const* row, bool wanted,
                               float dot, float (&out)[S::per_lane]) {
  LaneLogits<S> const logits(deal, seat, row);
  float const shift = logits.top();
  float const factor = 1.f / logits.sum_of_exp(shift);
#pragma unroll
  for (int i = 0; i < S::per_lane; ++i) {
    float const dense = expf(logits.value[i] - shift) * factor * dot;
    if (wanted) out[i] -= dense;
  }
}

template <class S, class T>
__device__ void store(Deal const& deal, Seat<S> const& seat, float const (&out)[S::per_lane],
                      T* row) {
  int const first = deal.first(seat.lane, S::per_lane), count = deal.count(seat.lane, S::per_lane);
  if (S::per_lane % 4 == 0 && deal.by_four) {
#pragma unroll
    for (int i = 0; i < S::per_lane / 4; ++i) {
      if (4 * i >= count) break;
      float const* const v = out + 4 * i;
      if constexpr (sizeof(T) == 4) {
        reinterpret_cast<float4*>(row + first)[i] = {v[0], v[1], v[2], v[3]};
      } else {
        reinterpret_cast<uint2*>(row + first)[i] = {pack<T>(v[0], v[1]), pack<T>(v[2], v[3])};
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < S::per_lane; ++i) {
      if (i < count) row[first + i] = T(out[i]);
    }
  }
}

// T: the element type of dlogits.
template <class S, class T>
__global__ void __launch_bounds__(kRouterThreads) router_gradient_kernel(RouterGradient x,
                                                                         int64_t stride,
                                                                         int64_t out_stride,
                                                                         Deal deal) {
  __shared__ alignas(16) float shared[S::tokens][S::experts];
  Seat<S> const seat;
  if (seat.token - threadIdx.x % 32 / S::lanes >= x.tokens) return;  // the whole warp
  int64_t const token = min(seat.token, x.tokens - 1);
  int const lane = seat.lane;
  SlotSpan const slots = slots_of(x.token_offsets, slot_count(x), x.top_k, token);
  int const mine = int(slots.begin) + lane, end = int(slots.end);           // below 2^31
  int const most = __reduce_max_sync(~0u, max(end - int(slots.begin), 0));  // of the warp's tokens
  float* const sparse = shared[seat.token_in_block];                        // the choices' part
  float const inverse = x.router.scale == 0 ? 0.f : 1.f / float(x.router.scale);
  float const* const row = static_cast<float const*>(x.logits.data) + token * stride;
  bool renormalized = x.router.renormalize;
  if (renormalized && needs_logits(x.router) && x.logits.data != nullptr) {
    renormalized = !is_floored(x, deal, seat, row, mine, end);
  }
#pragma unroll
  for (int i = 0; i < S::per_lane; ++i) sparse[lane * S::per_lane + i] = 0;

  Choice const first = choice(x, mine, end);
  bool any = first.id >= 0;
  float dot = first.score * first.dscore;
#pragma unroll 1
  for (int slot = mine + S::lanes; slot < end; slot += S::lanes) {
    Choice const c = choice(x, slot, end);
    any |= c.id >= 0;
    dot += c.score * c.dscore;
  }
  dot = lanes_sum<S>(dot);
  any = lanes_any(seat, any);
  __syncwarp();
#pragma unroll 1
  for (int base = 0; base < most; base += S::lanes) {
    Choice const c = base == 0 ? first : choice(x, mine + base, end);
    float const d = renormalized ? c.dscore - dot * inverse : c.dscore;
    add_terms(seat, c.id, c.score * d * c.slope, sparse);
  }
  float out[S::per_lane];
#pragma unroll
  for (int i = 0; i < S::per_lane; ++i) out[i] = sparse[lane * S::per_lane + i];
  if (x.router.score == Score::softmax && x.logits.data != nullptr) {
    // Padding's logits may be NaN.
    subtract_dense(deal, seat, row, any && !renormalized, dot, out);
#pragma unroll
    for (float& v : out) v = any ? v : 0.f;
  }
  if (seat.token < x.tokens) {
    store(deal, seat, out, static_cast<T*>(x.dlogits.data) + token * out_stride);
  }
}

}  // namespace

void router_gradient(RouterGradient const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "dtype: expected float32 on CUDA");
  require_at_most(slot_count(x), kMostCounted, "slots");
  if (x.tokens == 0) return;
  int64_t const stride = row_stride(x.logits, x.experts);
  int64_t const out_stride = row_stride(x.dlogits, x.experts);
  bool const aligned = by_four(x.logits, stride) && by_four(x.dlogits, out_stride);
  with_shape(x.experts, 1, aligned, [&](auto shape, Deal const& deal) {
    using S = decltype(shape);
    auto const launch = [&](auto element) {
      router_gradient_kernel<S, decltype(element)>
          <<<router_blocks<S>(x.tokens), kRouterThreads, 0, queue.stream>>>(x, stride, out_stride,
                                                                            deal);
    };
    if (x.rounded_to == DType::float32) {
      launch(float());
    } else {
      with_type(x.rounded_to, launch);
    }
  });
  cuda_check(cudaGetLastError(), "launch of router_gradient");
}

}  // namespace guild::cuda
