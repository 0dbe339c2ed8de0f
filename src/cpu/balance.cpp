// Sums over tokens for balancing a router, and their gradient.
#include <algorithm>

#include "checks/check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

// p of a token's experts and the logsumexp of its logits. p and softmax: (E).
template <class F>
F shares_of(Score score, F const* logits, int64_t experts, F* p, F* softmax) {
  F top = -INFINITY, sum = 0, sum_of_exp = 0;
  bool nan = false;
  for (int64_t e = 0; e < experts; ++e) {
    top = std::max(top, logits[e]);
    nan |= std::isnan(logits[e]);
  }
  F const shift = weight_shift(score, top);
  for (int64_t e = 0; e < experts; ++e) {
    sum += p[e] = unscaled_weight(score, logits[e], shift);
    sum_of_exp += softmax[e] = exact_exp(logits[e] - top);
  }
  if (score != Score::softmax && sum == 0) sum = 1;  // all of them are 0
  for (int64_t e = 0; e < experts; ++e) p[e] /= sum, softmax[e] /= sum_of_exp;
  return std::isinf(top) && !nan ? top : top + std::log(sum_of_exp);
}

template <class F>
void sum_sequence(BalanceSums const& x, int64_t sequence) {
  Scratch scratch;
  int64_t const length = x.tokens / x.sequences;
  F *const p = scratch.take<F>(x.experts), *const softmax = scratch.take<F>(x.experts);
  double* const shares = scratch.take<double>(x.experts);  // of up to millions of tokens
  double squares = 0;
  int32_t* const counts = x.counts + sequence * x.experts;
  std::fill_n(shares, x.experts, 0.);
  std::fill_n(counts, x.experts, 0);
  for (int64_t token = sequence * length; token < (sequence + 1) * length; ++token) {
    if (x.token_mask != nullptr && x.token_mask[token] == 0) continue;
    F const* const logits = rows_of<F>(x.logits, x.experts).row(token);
    F const lse = shares_of(x.score, logits, x.experts, p, softmax);
    squares += double(lse) * lse;
    for (int64_t e = 0; e < x.experts; ++e) shares[e] += p[e];
    for (int64_t slot = token * x.top_k; slot < (token + 1) * x.top_k; ++slot) {
      if (x.ids[slot] >= 0 && x.ids[slot] < x.experts) ++counts[x.ids[slot]];
    }
  }
  std::copy_n(shares, x.experts, static_cast<F*>(x.shares) + sequence * x.experts);
  static_cast<F*>(x.squares)[sequence] = F(squares);
}

// With dp and dq the gradients of shares and squares, dot = sum of p dp over the experts:
//   dlogit_e = p_e (dp_e - dot) + 2 logsumexp softmax_e dq, the first term times the slope where p
//   is not a softmax
template <class F>
void gradient_token(BalanceGradient const& x, int64_t token) {
  Scratch scratch;
  F* const out = rows_of<F>(x.dlogits, x.experts).row(token);
  if (x.token_mask != nullptr && x.token_mask[token] == 0) {
    std::fill_n(out, x.experts, F(0));
    return;
  }
  F *const p = scratch.take<F>(x.experts), *const softmax = scratch.take<F>(x.experts);
  F const* const logits = rows_of<F>(x.logits, x.experts).row(token);
  int64_t const sequence = token / (x.tokens / x.sequences);
  F const* const dp = static_cast<F const*>(x.dshares) + sequence * x.experts;
  F const dq = static_cast<F const*>(x.dsquares)[sequence];
  F const lse = shares_of(x.score, logits, x.experts, p, softmax);
  F dot = 0;
  for (int64_t e = 0; e < x.experts; ++e) dot += p[e] * dp[e];
  for (int64_t e = 0; e < x.experts; ++e) {
    F const slope = x.score == Score::softmax ? F(1) : weight_slope(x.score, logits[e]);
    out[e] = p[e] * (dp[e] - dot) * slope;
    if (dq != 0) out[e] += 2 * lse * dq * softmax[e];  // not of an infinite logsumexp times 0
  }
}

constexpr double kWorkPerLogit = 8;  // exponentials

template <class Body>
void with_floats(DType dtype, Body&& body) {
  dtype == DType::float64 ? body.template operator()<double>() : body.template operator()<float>();
}

}  // namespace

void balance_sums(BalanceSums const& x) {
  require_processor();
  check(x);
  with_floats(x.dtype, [&]<class F>() {
    parallel(x.sequences, kWorkPerLogit * double(x.tokens * x.experts),
             [&](int64_t sequence) { sum_sequence<F>(x, sequence); });
  });
}

void balance_gradient(BalanceGradient const& x) {
  require_processor();
  check(x);
  with_floats(x.dtype, [&]<class F>() {
    parallel(x.tokens, kWorkPerLogit * double(x.tokens * x.experts),
             [&](int64_t token) { gradient_token<F>(x, token); });
  });
}

}  // namespace guild::cpu
