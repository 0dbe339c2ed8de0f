// The router: several lanes per token choose the largest remaining key K times.
//
//   keys       what experts are ranked by: the logit, or p + bias
//   best       each lane's largest keys, up to four, sorted, as integers
//   choices    the largest of the lanes' first keys wins; its lane pops it. When a lane runs out,
//              all lanes find their next best keys
//   weights    of the chosen experts, one lane each, from their logits
//
// The integer order handles ties and NaN: NaN is below every number, and of equal keys the lowest
// lane, which has the smaller ids, wins. So any logits give K distinct ids in range.
#pragma once
#include "cuda/arch/copy.cuh"
#include "cuda/routing/router.cuh"

namespace guild::cuda {

// What is known about the router at compile time. Each few-token kernel exists in both variants:
// between layers a kernel's instructions are fetched from memory again, even those it skips
// (docs/measured/few_tokens.md).
enum class Ranking {
  softmax,  // by logit, without groups
  any,
};
inline Ranking ranking_of(Route const& x) {
  bool const softmax = x.router.score == Score::softmax && x.router.groups == 1;
  return softmax && ranked_by_logit(x) ? Ranking::softmax : Ranking::any;
}
// Calls f.template operator()<ranking>().
template <class F>
void with_ranking(Route const& x, F&& f) {
  if (ranking_of(x) == Ranking::softmax) {
    f.template operator()<Ranking::softmax>();
  } else {
    f.template operator()<Ranking::any>();
  }
}
template <Ranking ranking>
__device__ bool by_logit(Route const& x) {
  return ranking == Ranking::softmax || ranked_by_logit(x);
}
template <Ranking ranking>
__device__ Score score_of(Router const& router) {
  return ranking == Ranking::softmax ? Score::softmax : router.score;
}
template <Ranking ranking>
__device__ bool has_groups(Router const& router) {
  return ranking == Ranking::any && router.groups > 1;
}
// Whether an expert's key follows from its own logit alone, but is not that logit.
template <Ranking ranking = Ranking::any>
GUILD_HD bool has_plain_keys(Route const& x) {
  return ranking == Ranking::any && !ranked_by_logit(x) && x.router.score != Score::softmax;
}

// p of this lane's experts plus their biases.
template <class S>
__device__ void keys_of_p(Route const& x, LaneLogits<S> const& logits, float (&key)[S::per_lane]) {
  Score const score = x.router.score;
  bool const softmax = score == Score::softmax;
  float const shift = softmax ? logits.top() : 0.f;
  float const factor = softmax ? 1.f / logits.sum_by_neighbours(shift) : 1.f;
  float const* const bias = static_cast<float const*>(x.selection_bias);
#pragma unroll
  for (int i = 0; i < S::per_lane; ++i) {
    key[i] = softmax ? expf(logits.value[i] - shift) * factor
                     : unscaled_weight(score, logits.value[i], 0.f);
    if (bias != nullptr && i < logits.count) key[i] += bias[logits.first + i];
  }
}

// The keys of the lane's experts as integers; 0 past the last expert. plain: the lane has
// `per_lane` experts and no key is NaN.
template <int per_lane>
__device__ void orders_of(float const (&key)[per_lane], int count, bool plain,
                          uint32_t (&order)[per_lane]) {
#pragma unroll
  for (int i = 0; i < per_lane; ++i) order[i] = order_of_number(key[i]);
  if (plain) return;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) order[i] = i < count ? order_of(key[i]) : 0;
}

// A lane's best experts in descending order, from the keys of all its experts; 0: none.
template <class S>
struct Best {
  static constexpr int kept = S::per_lane < 4 ? S::per_lane : 4;
  static constexpr bool all = kept == S::per_lane;  // whether it has all of the lane's experts
  uint32_t order[kept] = {};
  uint32_t places = 0;  // a byte each: which of the lane's experts

  // Of equal keys the earlier is better.
  __device__ explicit Best(uint32_t const (&orders)[S::per_lane]) {
#pragma unroll
    for (int i = 0; i < S::per_lane; ++i) insert(orders[i], i);
  }
  __device__ void insert(uint32_t x, uint32_t place) {
    constexpr uint32_t with_new[] = {0x2104, 0x2140, 0x2410,
                                     0x4210};  // byte selectors that insert `place`
    uint32_t bytes = 0x3210;
#pragma unroll
    for (int i = kept - 1; i >= 0; --i) bytes = x > order[i] ? with_new[i] : bytes;
    places = __byte_perm(places, place, bytes);
#pragma unroll
    for (int i = kept - 1; i > 0; --i) order[i] = max(order[i], min(order[i - 1], x));
    order[0] = max(order[0], x);
  }
  __device__ int place() const { return int(places & 255); }
  __device__ void pop(bool wins) {
#pragma unroll
    for (int i = 0; i + 1 < kept; ++i) order[i] = wins ? order[i + 1] : order[i];
    order[kept - 1] = wins ? 0 : order[kept - 1];
    places >>= wins ? 8 : 0;
  }
};

// Whether this lane's group is among the best, by its largest key or the sum of the two largest.
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
  bool const two = router.group_score == GroupScore::top2_sum && deal.part > 1;
  uint32_t const score = two ? order_of(value_of(first) + value_of(second)) : first;
  int better = 0;
  for (int g = 0; g < router.groups; ++g) {
    uint32_t const other = __shfl_sync(~0u, score, g << deal.log_lanes, S::lanes);
    better += other > score || (other == score && g < group);
  }
  return group < router.groups && better < router.top_groups;
}

// Writes the ids of the K best to `chosen`, best first. Returns the key of choice number `lane`.
template <Ranking ranking, class S>
__device__ uint32_t choose(Route const& x, Deal const& deal, Seat<S> const& seat, int first,
                           uint32_t (&orders)[S::per_lane], uint32_t* chosen) {
  unsigned const below = seat.below();
  int const top_k = int(x.top_k);
  uint32_t const place_of_chosen = kept(shared_address(chosen));
  uint32_t mine = 0;
  for (int k = 0;;) {
    Best<S> best(orders);
    if (k == 0 && has_groups<ranking>(x.router) && !open_group(x.router, deal, seat, best)) {
#pragma unroll
      for (uint32_t& order : orders) order = 0;
      best = Best<S>(orders);
    }
    uint32_t top = 0, last = 0;  // the last key chosen; its place, if this lane's
    bool emptied = false, ran_out = false;
    for (; k < top_k && !ran_out; ++k) {
      top = lanes_max<S>(best.order[0]);
      mine = k == seat.lane ? top : mine;
      bool const equal = best.order[0] == top;
      unsigned const equals = __ballot_sync(~0u, equal);
      bool const wins = equal && (equals & below) == 0;
      last = best.place();
      store_shared_if(wins, place_of_chosen + 4 * k, first + last);
      best.pop(wins);
      if (!Best<S>::all) {
        emptied = wins && best.order[0] == 0;
        ran_out = __any_sync(~0u, emptied);
      }
    }
    if (Best<S>::all || k == top_k) return mine;
    // Removes the chosen keys: all that come before the lane's first remaining one.
    uint32_t const front = emptied ? top : best.order[0];
    int const place = emptied ? int(last) + 1 : best.place();
#pragma unroll
    for (int i = 0; i < S::per_lane; ++i) {
      bool const taken = orders[i] > front || (orders[i] == front && i < place);
      orders[i] = taken ? 0 : orders[i];
    }
  }
}

// Writes the ids and weights of the chosen. row: the token's logits; order: the key of choice
// number `lane`; unbounded: any_unbounded() of the lane's logits.
template <Ranking ranking, class S>
__device__ void write_choices(Route const& x, Seat<S> const& seat, LaneLogits<S> const& logits,
                              float const* row, uint32_t const* chosen, uint32_t order,
                              bool unbounded) {
  Router const& router = x.router;
  Score const kind = score_of<ranking>(router);
  bool const softmax = kind == Score::softmax, relative = weighs_relatively(router);
  int const top_k = int(x.top_k), lane = seat.lane;
  // A lane keeps its first choice's logit in registers and reads those beyond S::lanes again.
  float logit = -INFINITY;
  if (lane < top_k) logit = by_logit<ranking>(x) ? value_of(order) : row[chosen[lane]];
  float shift = 0, factor = 1, weight = 0;
  if (relative) {
    float top = logit;
    if (by_logit<ranking>(x)) {  // the first one is the largest
      top = __shfl_sync(~0u, logit, 0, S::lanes);
    } else {
#pragma unroll 1
      for (int k = lane + S::lanes; k < top_k; k += S::lanes) top = fmaxf(top, row[chosen[k]]);
      top = lanes_max<S>(top);
    }
    shift = weight_shift(kind, top);
  } else if (softmax) {
    shift = logits.top();
    factor = 1.f / logits.sum_by_neighbours(shift);
  }
  if (lane < top_k) weight = unscaled_weight(kind, logit, shift);
  if (router.renormalize) {
    float sum = weight;
#pragma unroll 1
    for (int k = lane + S::lanes; k < top_k; k += S::lanes) {
      sum += unscaled_weight(kind, row[chosen[k]], shift);
    }
    factor = factor_of_sum(router, lanes_sum<S>(sum), factor);
    if (softmax && lanes_any(seat, unbounded)) factor = NAN;
  }
  if (seat.token >= x.tokens) return;
  bool const real = x.token_mask == nullptr || x.token_mask[seat.token] != 0;
  int32_t* const ids = x.ids + seat.token * top_k;
  float* const scores = static_cast<float*>(x.scores) + seat.token * top_k;
  float* const slopes = static_cast<float*>(x.slopes) + seat.token * top_k;
#pragma unroll 1
  for (int k = lane; k < top_k; k += S::lanes) {
    if (k >= S::lanes) weight = unscaled_weight(kind, row[chosen[k]], shift);
    ids[k] = real ? int(chosen[k]) : -1;
    scores[k] = real ? weight * factor * float(router.scale) : 0.f;
    if (x.slopes != nullptr) {
      slopes[k] = real ? weight_slope(kind, row[chosen[k]]) : 0.f;
    }
  }
}

__device__ inline float plain_key(Route const& x, float logit, float bias) {
  float const key = unscaled_weight(x.router.score, logit, 0.f);
  return x.selection_bias != nullptr ? key + bias : key;
}

// row: the logits of this thread's token; keys: theirs if they are known, else null; chosen: room
// for the ids of its choices.
template <Ranking ranking, class S>
__device__ void route_token(Route const& x, Deal const& deal, Seat<S> const& seat, float const* row,
                            float const* keys, uint32_t* chosen) {
  LaneLogits<S> const logits(deal, seat, row);
  uint32_t orders[S::per_lane];
  bool const unbounded = any_unbounded(logits.value), full = deal.experts == S::experts;
  if (by_logit<ranking>(x)) {
    orders_of(logits.value, logits.count, full && !unbounded, orders);
  } else if (keys != nullptr) {
    LaneLogits<S> const key(deal, seat, keys);
    orders_of(key.value, key.count, full && !any_nan(key.value), orders);
  } else {
    float key[S::per_lane];
    keys_of_p(x, logits, key);
    orders_of(key, logits.count, full && !any_nan(key), orders);
  }
  uint32_t const order = choose<ranking>(x, deal, seat, logits.first, orders, chosen);
  __syncwarp();
  write_choices<ranking>(x, seat, logits, row, chosen, order, unbounded);
}

}  // namespace guild::cuda
