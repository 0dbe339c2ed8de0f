// The router for a few tokens, from the partial sums of its product: one block per token, bitwise
// equal to route.cuh. Instruction caches are cold at each layer and fetching takes longer than
// running, so the code is kept short.
//
//   all warps   compute logits, four neighbours per thread, and the experts' keys, as integers
//   warp 0      zeroes the keys of closed groups. No chosen key is below the K-th largest of the
//               lanes' maxima, and usually few keys reach it: up to 32 are ranked by counting, one
//               per lane; of more, the largest is taken K times
#pragma once
#include "cuda/routing/logit_parts.cuh"
#include "cuda/routing/route.cuh"
#include "shared/router_product.h"

namespace guild::cuda {

// The most tokens, and the most choices per token, each of which a lane holds with its weight. Up
// to kFewExperts experts, route.cu's other kernels are faster.
inline constexpr int64_t kMostBlocksOfToken = 256, kMostChoices = 16, kFewExperts = 256;

struct alignas(16) RouteOfToken {
  static constexpr int kMostExperts = int(kMostSplitExperts), kMostGroups = 32;
  static constexpr int kThreads = kMostExperts / 4;     // at least; any others wait
  static constexpr int kQuads = kMostExperts / 32 / 4;  // of a lane; four neighbours each
  using Keys = uint32_t[kQuads][4];  // a lane's: of quads lane, lane + 32, ...; 0: none

  // What write() reads.
  uint32_t chosen[kMostChoices], key[kMostChoices];
  float logit[kMostExperts];
  // Only choose() needs the rest.
  uint32_t order[kMostExperts];  // keys as integers; 0: none
  uint32_t group[kMostGroups];   // scores of groups, likewise
  uint32_t candidate[32], candidate_key[32];

  static __device__ int lane() { return int(threadIdx.x) % 32; }
  // How many quads a lane needs so that all lanes together hold every expert.
  static __device__ int quads(int experts) { return (experts + 127) / 128; }

  // Writes logits and keys of all experts, and keys of 0 up to a whole number of quads per lane.
  // Returns whether a softmax of the logits would be NaN: one of them is NaN or +infinity. A
  // rehearsal (sm90/decode/plan_by_choice.cuh) reads no memory and makes up logits: all different,
  // with the best of them in a lane each, since ties, or many choices from one lane, would take
  // another path.
  template <Ranking ranking>
  __device__ bool find_keys(Route const& x, LogitParts const& parts, int64_t token, int experts,
                            bool rehearses = false) {
    int const e = 4 * int(threadIdx.x), count = min(4, experts - e);
    bool unbounded = false;
    if (e < 128 * quads(experts)) {
      float bias[4] = {}, sum[4] = {};
      auto const* const biases = rehearses ? nullptr : static_cast<float const*>(x.selection_bias);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (biases != nullptr && i < count) bias[i] = biases[e + i];
      }
      if (!rehearses) parts.sum_of_neighbours(token * experts + e, count, sum);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (rehearses) sum[i] = float(-e) / 64 - float(8 * i);
        logit[e + i] = sum[i];
        uint32_t const found =
            order_of(by_logit<ranking>(x) ? sum[i] : plain_key(x, sum[i], bias[i]));
        order[e + i] = i < count ? found : 0;
        unbounded |= i < count && !(sum[i] < INFINITY);
      }
    }
    return __syncthreads_or(unbounded) != 0;
  }

  // Writes the best experts of the token, in order, to chosen and key. Warp 0.
  template <Ranking ranking>
  __device__ void choose(Router const& router, int experts, int top_k) {
    int const count = quads(experts);
    Keys own = {};
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (q < count) memcpy(own[q], order + 128 * q + 4 * lane(), sizeof own[q]);
    }
    if (has_groups<ranking>(router)) close_groups(router, experts / router.groups, count, own);
    uint32_t left = 0, least = 0;
#pragma unroll
    for (auto const& quad : own) {
#pragma unroll
      for (uint32_t key : quad) left = max(left, key);
    }
#pragma unroll 1
    for (int k = 0; k < top_k; ++k) {
      least = __reduce_max_sync(~0u, left);
      left = left == least ? 0 : left;
    }
    int const found = gather(own, count, max(least, 1u));
    if (found > 32) return choose_one_by_one(own, count, top_k);
    uint32_t const mine = lane() < found ? candidate_key[lane()] : 0;
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < found; ++j) {
      uint32_t const other = __shfl_sync(~0u, mine, j);
      rank += other > mine || (other == mine && j < lane());
    }
    if (lane() < found && rank < top_k) chosen[rank] = candidate[lane()], key[rank] = mine;
    __syncwarp();
  }

  // Writes ids and weights of the chosen experts, one per lane. Warp 0. may_slope: whether slopes
  // may be wanted.
  template <Ranking ranking, bool may_slope>
  __device__ void write(Route const& x, int64_t token, int experts, bool unbounded) const {
    Router const& router = x.router;
    Score const kind = score_of<ranking>(router);
    bool const softmax = kind == Score::softmax, there = lane() < x.top_k;
    unsigned const id = there ? chosen[lane()] : 0;
    float value = -INFINITY, shift = 0, factor = 1, weight = 0;
    if (there) value = by_logit<ranking>(x) ? value_of(key[lane()]) : logit[id];
    if (weighs_relatively(router)) {
      shift = weight_shift(kind, by_logit<ranking>(x) ? __shfl_sync(~0u, value, 0)
                                                      : lanes_max<TokenShape<32, 2>>(value));
    } else if (softmax) {
      shift = top_logit(experts);
      factor = 1.f / sum_by_neighbours(experts, shift);
    }
    if (there) weight = unscaled_weight(kind, value, shift);
    if (router.renormalize) {
      factor = factor_of_sum(router, lanes_sum<TokenShape<32, 2>>(weight), factor);
      if (softmax && unbounded) factor = NAN;
    }
    if (!there) return;
    bool const real = is_real(x, token);
    int64_t const slot = token * x.top_k + lane();
    x.ids[slot] = real ? int(id) : -1;
    static_cast<float*>(x.scores)[slot] = real ? weight * factor * float(router.scale) : 0.f;
    if (!may_slope || x.slopes == nullptr) return;
    static_cast<float*>(x.slopes)[slot] = real ? weight_slope(kind, logit[id]) : 0.f;
  }

  static __device__ bool is_real(Route const& x, int64_t token) {
    return x.token_mask == nullptr || x.token_mask[token] != 0;
  }

 private:
  // Clears the keys of groups that are not among the best, ranked by their largest key or two. A
  // group is the quads of one or several neighbouring lanes.
  __device__ void close_groups(Router const& router, int part, int count, Keys& own) {
    bool const two = router.group_score == GroupScore::top2_sum;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (q >= count) break;
      uint32_t const* const k = own[q];
      uint32_t const high = max(k[0], k[1]), low = min(k[0], k[1]);
      uint32_t const high_too = max(k[2], k[3]), low_too = min(k[2], k[3]);
      uint32_t first = max(high, high_too);
      uint32_t second = max(min(high, high_too), max(low, low_too));
#pragma unroll 1
      for (int step = part / 8; step > 0; step /= 2) {
        uint32_t const other = __shfl_xor_sync(~0u, first, step);
        uint32_t const other_second = __shfl_xor_sync(~0u, second, step);
        second = max(min(first, other), max(second, other_second));
        first = max(first, other);
      }
      int const e = 128 * q + 4 * lane();
      if (e % part == 0 && e / part < router.groups) {
        group[e / part] = two ? order_of(value_of(first) + value_of(second)) : first;
      }
    }
    __syncwarp();
    int const g = lane();
    uint32_t const mine = g < router.groups ? group[g] : 0;
    int better = 0;
#pragma unroll 4
    for (int j = 0; j < router.groups; ++j) {
      uint32_t const other = __shfl_sync(~0u, mine, j);
      better += other > mine || (other == mine && j < g);
    }
    unsigned const open = __ballot_sync(~0u, better < router.top_groups);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (q >= count) break;
      int const at = min((128 * q + 4 * lane()) / part, 31);
#pragma unroll
      for (uint32_t& key : own[q]) key = (open >> at & 1) != 0 ? key : 0;
    }
  }

  // Lists the experts whose keys are at least `least`, the first 32 of them, by id. Returns how
  // many there are.
  __device__ int gather(Keys const& own, int count, uint32_t least) {
    unsigned const below = (1u << lane()) - 1;
    int found = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (q >= count) break;
      int at = found;
#pragma unroll
      for (uint32_t key : own[q]) {
        unsigned const stay = __ballot_sync(~0u, key >= least);
        at += __popc(stay & below);
        found += __popc(stay);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (own[q][i] < least) continue;
        if (at < 32)
          candidate[at] = unsigned(128 * q + 4 * lane() + i), candidate_key[at] = own[q][i];
        ++at;
      }
    }
    __syncwarp();
    return found;
  }

  // The same choice where many keys are equal.
  __device__ void choose_one_by_one(Keys const& own, int count, int top_k) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (q < count) memcpy(order + 128 * q + 4 * lane(), own[q], sizeof own[q]);
    }
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < top_k; ++k) {
      uint32_t largest = 0;
      unsigned place = 0;
#pragma unroll 1
      for (int e = lane(); e < 128 * count; e += 32) {
        if (order[e] > largest) largest = order[e], place = unsigned(e);
      }
      uint32_t const top = __reduce_max_sync(~0u, largest);
      unsigned const first = __reduce_min_sync(~0u, largest == top ? place : ~0u);
      if (lane() == 0) chosen[k] = first, key[k] = top, order[first] = 0;
      __syncwarp();
    }
  }

  // The token's largest logit.
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
};

// Whether RouteOfToken can choose. It supports neither keys that are softmax values, which need
// every logit first, nor a softmax over all experts with groups. A group must be whole quads.
inline bool fits_route_of_token(Route const& x) {
  Router const& router = x.router;
  bool const softmax = router.score == Score::softmax;
  bool const simple = ranked_by_logit(x) || !softmax;
  bool const sums = softmax && !weighs_relatively(router);
  int64_t const part = x.experts / router.groups;
  bool const whole = part % 4 == 0 && part <= 128 && std::has_single_bit(uint64_t(part));
  return x.experts <= kMostSplitExperts && x.top_k <= kMostChoices && simple &&
         (router.groups == 1 || (whole && !sums));
}

// Whether RouteOfToken is the fastest way.
inline bool serves_few(Route const& x) {
  return x.experts > kFewExperts && x.tokens <= kMostBlocksOfToken && fits_route_of_token(x);
}

}  // namespace guild::cuda
