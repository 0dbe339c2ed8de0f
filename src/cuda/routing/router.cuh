// Shared by the router kernels: several lanes of a warp hold a token's logits in registers.
//
// A lane holds consecutive experts of one group. Lanes are first divided among the groups, so that
// lower lanes have smaller ids, which win ties.
#pragma once
#include <bit>

#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "shared/ceil_div.h"
#include "shared/routing.h"

namespace guild::cuda {

inline constexpr int kRouterThreads = 256;

// Lanes per token, and the most experts per lane: both powers of two.
template <int lanes_, int per_lane_>
struct TokenShape {
  static constexpr int lanes = lanes_, per_lane = per_lane_;
  static constexpr int tokens = kRouterThreads / lanes;  // of a block
  static constexpr int experts = lanes * per_lane;       // at most
};

// Which experts a lane holds.
struct Deal {
  int experts = 0;
  int part = 0;          // experts per group
  int log_lanes = 0;     // log2 of the lanes per group
  bool by_four = false;  // whether four logits can be loaded or stored at a time

  __device__ int first(int lane, int per_lane) const {
    return (lane >> log_lanes) * part + (lane & ((1 << log_lanes) - 1)) * per_lane;
  }
  __device__ int count(int lane, int per_lane) const {
    int const left_in_part = part - (lane & ((1 << log_lanes) - 1)) * per_lane;
    return max(0, min(per_lane, min(left_in_part, experts - first(lane, per_lane))));
  }
};

// A thread's place: its token and which of the token's lanes it is.
template <class S>
struct Seat {
  int lane = int(threadIdx.x) % S::lanes;
  int token_in_block = int(threadIdx.x) / S::lanes;
  int64_t token = int64_t(blockIdx.x) * S::tokens + token_in_block;

  // Masks of the warp's lanes that have this token, and of those among them below this lane.
  __device__ unsigned mine() const {
    return (S::lanes == 32 ? ~0u : (1u << S::lanes % 32) - 1) << (threadIdx.x % 32 - lane);
  }
  __device__ unsigned below() const { return mine() & ((1u << threadIdx.x % 32) - 1); }
};

// Reduces over the lanes of one token; the result is the same in each lane and in every run.
template <class S, class V, class Of>
__device__ V over_lanes(V x, Of&& of) {
#pragma unroll
  for (int step = S::lanes / 2; step > 0; step /= 2) x = of(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
template <class S>
__device__ float lanes_max(float x) {
  return over_lanes<S>(x, [](float a, float b) { return fmaxf(a, b); });
}
template <class S>
__device__ float lanes_sum(float x) {
  return over_lanes<S>(x, [](float a, float b) { return a + b; });
}
template <class S>
__device__ uint32_t lanes_max(uint32_t x) {
  if (S::lanes == 32) return __reduce_max_sync(~0u, x);
  return over_lanes<S>(x, [](uint32_t a, uint32_t b) { return max(a, b); });
}
template <class S>
__device__ bool lanes_any(Seat<S> const& seat, bool x) {
  return (__ballot_sync(~0u, x) & seat.mine()) != 0;
}

// Whether a softmax over the values is NaN: one of them is, or is +infinity.
template <int count>
__device__ bool any_unbounded(float const (&values)[count]) {
  bool unbounded = false;
#pragma unroll
  for (float x : values) unbounded |= !(x < INFINITY);
  return unbounded;
}

template <int count>
__device__ bool any_nan(float const (&values)[count]) {
  bool nan = false;
#pragma unroll
  for (float x : values) nan |= x != x;
  return nan;
}

// This lane's logits; past the last one: -infinity.
template <class S>
struct LaneLogits {
  int first, count;
  float value[S::per_lane];

  __device__ LaneLogits(Deal const& deal, Seat<S> const& seat, float const* row)
      : first(deal.first(seat.lane, S::per_lane)), count(deal.count(seat.lane, S::per_lane)) {
    if (S::per_lane % 4 == 0 && deal.by_four) {
#pragma unroll
      for (int i = 0; i < S::per_lane / 4; ++i) {
        float4 const four = 4 * i < count ? reinterpret_cast<float4 const*>(row + first)[i]
                                          : float4{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        memcpy(value + 4 * i, &four, sizeof four);
      }
    } else {
#pragma unroll
      for (int i = 0; i < S::per_lane; ++i) value[i] = i < count ? row[first + i] : -INFINITY;
    }
  }
  __device__ float top() const {  // of the token
    float largest = -INFINITY;
#pragma unroll
    for (float x : value) largest = fmaxf(largest, x);
    return lanes_max<S>(largest);
  }
  // Sum of exp(logit - shift) over the token's experts.
  __device__ float sum_of_exp(float shift) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < S::per_lane; ++i) {
      if (i < count) sum += expf(value[i] - shift);
    }
    return lanes_sum<S>(sum);
  }
  // The same by pairwise sums of neighbours: bitwise equal for any number of lanes.
  __device__ float sum_by_neighbours(float shift) const {
    constexpr int at_once = S::per_lane < 4 ? 2 : 4, parts = S::per_lane / at_once;
    auto const pair = [&](int i) {
      float const first = i < count ? expf(value[i] - shift) : 0.f;
      return first + (i + 1 < count ? expf(value[i + 1] - shift) : 0.f);
    };
    float sum[parts];
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      sum[i] = pair(at_once * i);
      if (at_once == 4) sum[i] += pair(at_once * i + 2);
    }
#pragma unroll
    for (int step = 1; step < parts; step *= 2) {
#pragma unroll
      for (int i = 0; i < parts; i += 2 * step) sum[i] += sum[i + step];
    }
#pragma unroll
    for (int step = 1; step < S::lanes; step *= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], step);
    return sum[0];
  }
};

// The factor that normalises the chosen experts' unscaled_weight()s: to a sum of 1 or, below the
// floor, less. sum: theirs; factor: the one that turns them into p.
__device__ inline float factor_of_sum(Router const& router, float sum, float factor) {
  if (router.score != Score::softmax && sum == 0) return 0;
  if (weighs_relatively(router)) return 1.f / sum;
  float const p = sum * factor, floor = float(router.sum_floor);
  return factor / (p < floor ? floor : p);
}

// Whether rows start on 16-byte boundaries. A null pointer counts as aligned.
inline bool by_four(ConstRows const& rows, int64_t stride) {
  return stride % 4 == 0 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
}

template <class S>
unsigned router_blocks(int64_t tokens) {
  return unsigned(ceil_div(tokens, S::tokens));
}

// Calls f(shape, Deal) with the first of the shapes that fits the experts and groups.
template <class... Shapes, class F>
void with_first_of(int64_t experts, int groups, bool by_four, F&& f) {
  require_routable(experts);
  int const part = int(experts) / groups;
  Deal deal{int(experts), part, 0, by_four && part % 4 == 0};
  auto const fits = [&](auto shape) {
    if (groups > shape.lanes) return false;
    deal.log_lanes = std::bit_width(unsigned(shape.lanes / groups)) - 1;
    return part <= shape.per_lane << deal.log_lanes;
  };
  auto const run = [&](auto shape) { return fits(shape) && (f(shape, deal), true); };
  bool const done = (run(Shapes{}) || ...);
  require(done, "router.groups: expected groups of at most ",
          32 * std::bit_floor(unsigned(32 / groups)), " experts on CUDA, got ", part);
}

// The same with the fewest lanes and registers: most of a warp's work does not depend on how many
// tokens it has, so it should have many. UpTo128: the shape for 65 to 128 experts.
template <class UpTo128 = TokenShape<16, 8>, class F>
void with_shape(int64_t experts, int groups, bool by_four, F&& f) {
  with_first_of<TokenShape<4, 2>, TokenShape<8, 4>, TokenShape<8, 8>, UpTo128, TokenShape<16, 16>,
                TokenShape<32, 16>, TokenShape<32, 32>>(experts, groups, by_four, f);
}

// The same with a whole warp per token, which is fastest where tokens are few.
template <class F>
void with_whole_warp(int64_t experts, int groups, bool by_four, F&& f) {
  with_first_of<TokenShape<32, 2>, TokenShape<32, 4>, TokenShape<32, 8>, TokenShape<32, 16>,
                TokenShape<32, 32>>(experts, groups, by_four, f);
}

// Up to this many choices, every shape adds a token's weights in the same order.
inline constexpr int64_t kMostAlike = 16;

}  // namespace guild::cuda
