// The weights of a token's experts, and what their gradient needs, from its logits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "shared/routing.h"

namespace guild::cpu {

// The terms with which a token's p is unscaled_weight(score, logit, shift) / sum: for softmax, over
// all experts; otherwise shift 0 and sum 1, since p depends on one logit alone.
template <class F>
struct Normalizer {
  F shift = 0, sum = 1;

  Normalizer() = default;
  Normalizer(Score score, F const* logits, int64_t experts) {
    if (score != Score::softmax) return;
    shift = -INFINITY;
    for (int64_t e = 0; e < experts; ++e) shift = std::max(shift, logits[e]);
    double total = 0;  // in float32, thousands of terms would cost a digit
    for (int64_t e = 0; e < experts; ++e) total += exact_exp(logits[e] - shift);
    sum = F(total);
  }
};

// Writes the weights of the `count` chosen experts and, unless null, their slopes. all: the token's
// normalizer.
template <class F>
void write_weights(Router const& router, F const* logits, Normalizer<F> const& all,
                   int32_t const* ids, int64_t count, F* scores, F* slopes) {
  bool const softmax = router.score == Score::softmax, relative = weighs_relatively(router);
  F shift = all.shift, sum = 0;
  if (relative) {
    F top = -INFINITY;
    for (int64_t k = 0; k < count; ++k) top = std::max(top, logits[ids[k]]);
    shift = weight_shift(router.score, top);
  }
  for (int64_t k = 0; k < count; ++k) {
    sum += scores[k] = unscaled_weight(router.score, logits[ids[k]], shift);
  }
  F divisor = relative ? sum : all.sum;
  if (router.renormalize && !relative) {
    F const p = sum / all.sum, floor = F(router.sum_floor);
    divisor *= p < floor ? floor : p;
  }
  if (softmax && all.sum != all.sum) divisor = all.sum;  // NaN
  if (!softmax && divisor == 0) divisor = 1;             // all of them are 0
  for (int64_t k = 0; k < count; ++k) scores[k] = scores[k] / divisor * F(router.scale);
  for (int64_t k = 0; slopes != nullptr && k < count; ++k) {
    slopes[k] = weight_slope(router.score, logits[ids[k]]);
  }
}

// Whether the sum of p over the chosen is below the floor that the router gives it. ids outside
// [0, E) are not chosen.
template <class F>
bool is_floored(Router const& router, F const* logits, Normalizer<F> const& all, int64_t experts,
                int32_t const* ids, int64_t count) {
  F sum = 0;
  for (int64_t k = 0; k < count; ++k) {
    if (ids[k] < 0 || ids[k] >= experts) continue;
    sum += unscaled_weight(router.score, logits[ids[k]], all.shift);
  }
  return sum / all.sum < F(router.sum_floor);
}

}  // namespace guild::cpu
