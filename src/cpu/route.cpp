// Choose K experts and their weights for each token, and the gradient of the weights.
#include <algorithm>
#include <numeric>

#include "check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/activation.h"

namespace guild::cpu {

namespace {

// p of every expert.
template <class F>
void probabilities(Score score, F const* logits, F* p, int64_t experts) {
  if (score == Score::sigmoid) {
    for (int64_t e = 0; e < experts; ++e) p[e] = sigmoid(logits[e]);
    return;
  }
  F const top = *std::max_element(logits, logits + experts);
  F sum = 0;
  for (int64_t e = 0; e < experts; ++e) sum += p[e] = exponential(logits[e] - top);
  for (int64_t e = 0; e < experts; ++e) p[e] /= sum;
}

// The first `count` experts by falling key; NaN comes after every number, then the smaller id.
template <class F>
void select(F const* key, int32_t* order, int64_t experts, int64_t count) {
  std::iota(order, order + experts, 0);
  std::partial_sort(order, order + count, order + experts, [key](int32_t a, int32_t b) {
    bool const a_nan = key[a] != key[a], b_nan = key[b] != key[b];
    if (a_nan != b_nan) return b_nan;
    if (!a_nan && key[a] != key[b]) return key[a] > key[b];
    return a < b;
  });
}

// p of the chosen, divided by their sum if renormalize, times scale.
template <class F>
void weights(Router const& router, F const* p, int32_t const* ids, F* out, int64_t top_k) {
  for (int64_t k = 0; k < top_k; ++k) out[k] = p[ids[k]];
  F const sum = router.renormalize ? std::accumulate(out, out + top_k, F(0)) : F(1);
  for (int64_t k = 0; k < top_k; ++k) out[k] *= F(router.scale) / sum;
}

template <class F>
void route_token(Route const& x, int64_t token) {
  Scratch scratch;
  F const* const logits = rows_of<F>(x.logits, x.experts).row(token);
  F *const p = scratch.take<F>(x.experts), *const key = scratch.take<F>(x.experts);
  auto* const order = scratch.take<int32_t>(x.experts);
  probabilities(x.router.score, logits, p, x.experts);
  auto const* const bias = static_cast<F const*>(x.selection_bias);
  for (int64_t e = 0; e < x.experts; ++e) key[e] = bias == nullptr ? p[e] : p[e] + bias[e];
  select(key, order, x.experts, x.top_k);
  std::copy_n(order, x.top_k, x.ids + token * x.top_k);
  weights(x.router, p, order, static_cast<F*>(x.scores) + token * x.top_k, x.top_k);
}

// With w the weights before scaling and d = scale * dscores:
//   renormalize   d of a p: (d_k - sum_j w_j d_j) / sum of p;   softmax: dlogit_k = w_k (...)
//   otherwise     d of a p: d_k;   softmax: dlogit_e = p_e (d_e - sum_j p_j d_j), for every e
// and sigmoid: dlogit_k = (d of p_k) * p_k (1 - p_k).
template <class F>
void gradient_token(RouterGradient const& x, int64_t token) {
  Scratch scratch;
  Router const& router = x.router;
  F const* const logits = rows_of<F>(x.logits, x.experts).row(token);
  F* const out = rows_of<F>(x.dlogits, x.experts).row(token);
  F const* const dscores = static_cast<F const*>(x.dscores) + token * x.top_k;
  F *const p = scratch.take<F>(x.experts), *const w = scratch.take<F>(x.top_k);
  auto* const ids = scratch.take<int32_t>(x.top_k);
  auto* const slots = scratch.take<int64_t>(x.top_k);
  int64_t chosen = 0;
  for (int64_t k = 0; k < x.top_k; ++k) {
    int32_t const id = x.ids[token * x.top_k + k];
    if (id >= 0 && id < x.experts) ids[chosen] = id, slots[chosen++] = k;
  }
  std::fill_n(out, x.experts, F(0));
  if (chosen == 0) return;

  probabilities(router.score, logits, p, x.experts);
  Router unscaled = router;
  unscaled.scale = 1;
  weights(unscaled, p, ids, w, chosen);
  F sum_p = 0, sum_wd = 0;
  for (int64_t k = 0; k < chosen; ++k) {
    sum_p += p[ids[k]];
    sum_wd += w[k] * F(router.scale) * dscores[slots[k]];
  }
  bool const softmax = router.score == Score::softmax;
  if (softmax && !router.renormalize) {
    for (int64_t e = 0; e < x.experts; ++e) out[e] = -p[e] * sum_wd;
  }
  for (int64_t k = 0; k < chosen; ++k) {
    F const d = F(router.scale) * dscores[slots[k]], q = p[ids[k]];
    F const centred = router.renormalize ? d - sum_wd : d;
    F const slope = softmax ? w[k] : q * (1 - q) / (router.renormalize ? sum_p : F(1));
    out[ids[k]] += slope * centred;
  }
}

constexpr double kWorkPerLogit = 8;  // exponentials, comparisons

template <class Body>
void for_tokens(int64_t tokens, int64_t experts, DType dtype, Body&& body) {
  auto const blocks = spans(tokens, kBlockRows);
  parallel(int64_t(blocks.size()), kWorkPerLogit * double(tokens * experts), [&](int64_t i) {
    for (int64_t t = blocks[i].first; t < blocks[i].first + blocks[i].count; ++t) {
      dtype == DType::float64 ? body.template operator()<double>(t)
                              : body.template operator()<float>(t);
    }
  });
}

}  // namespace

void route(Route const& x) {
  require_processor();
  check(x);
  for_tokens(x.tokens, x.experts, x.dtype,
             [&]<class F>(int64_t token) { route_token<F>(x, token); });
}

void router_gradient(RouterGradient const& x) {
  require_processor();
  check(x);
  for_tokens(x.tokens, x.experts, x.dtype,
             [&]<class F>(int64_t token) { gradient_token<F>(x, token); });
}

}  // namespace guild::cpu
