// Choose K experts and their weights for each token, and the gradient of the weights.
#include <algorithm>
#include <numeric>

#include "checks/check.h"
#include "cpu/router_weights.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

// p of every expert.
template <class F>
void probabilities(Score score, F const* logits, Normalizer<F> const& all, F* p, int64_t experts) {
  for (int64_t e = 0; e < experts; ++e) {
    p[e] = unscaled_weight(score, logits[e], all.shift) / all.sum;
  }
}

// The better of two keys: the greater one, NaN after every number, then the smaller index.
template <class F>
struct Better {
  F const* key;
  bool operator()(int32_t a, int32_t b) const {
    bool const a_nan = key[a] != key[a], b_nan = key[b] != key[b];
    if (a_nan != b_nan) return b_nan;
    if (!a_nan && key[a] != key[b]) return key[a] > key[b];
    return a < b;
  }
};

// Leaves the experts of the best groups in `ids`; returns their number.
template <class F>
int64_t keep_best_groups(Router const& router, F const* key, int32_t* ids, int64_t experts) {
  int64_t const size = experts / router.groups;
  F sum[kMostGroups];
  int32_t order[kMostGroups];
  for (int g = 0; g < router.groups; ++g) {
    int32_t* const group = ids + g * size;
    std::partial_sort(group, group + std::min<int64_t>(2, size), group + size, Better<F>{key});
    bool const two = router.group_score == GroupScore::top2_sum && size > 1;
    sum[g] = two ? key[group[0]] + key[group[1]] : key[group[0]];
  }
  std::iota(order, order + router.groups, 0);
  std::sort(order, order + router.groups, Better<F>{sum});
  std::sort(order, order + router.top_groups);
  for (int i = 0; i < router.top_groups; ++i) {
    std::copy_n(ids + order[i] * size, size, ids + i * size);
  }
  return router.top_groups * size;
}

template <class F>
void route_token(Route const& x, int64_t token) {
  F* const scores = static_cast<F*>(x.scores) + token * x.top_k;
  F* const slopes = x.slopes == nullptr ? nullptr : static_cast<F*>(x.slopes) + token * x.top_k;
  if (x.token_mask != nullptr && x.token_mask[token] == 0) {
    std::fill_n(x.ids + token * x.top_k, x.top_k, -1);
    std::fill_n(scores, x.top_k, F(0));
    if (slopes != nullptr) std::fill_n(slopes, x.top_k, F(0));
    return;
  }
  Scratch scratch;
  F const* const logits = rows_of<F>(x.logits, x.experts).row(token);
  F* const p = scratch.take<F>(x.experts);
  auto* const ids = scratch.take<int32_t>(x.experts);
  F const* key = logits;
  Normalizer<F> const all(x.router.score, logits, x.experts);
  if (!ranked_by_logit(x)) {
    probabilities(x.router.score, logits, all, p, x.experts);
    auto const* const bias = static_cast<F const*>(x.selection_bias);
    for (int64_t e = 0; bias != nullptr && e < x.experts; ++e) p[e] += bias[e];
    key = p;
  }
  std::iota(ids, ids + x.experts, 0);
  int64_t count = x.experts;
  if (x.router.groups > 1) count = keep_best_groups(x.router, key, ids, x.experts);
  std::partial_sort(ids, ids + x.top_k, ids + count, Better<F>{key});
  std::copy_n(ids, x.top_k, x.ids + token * x.top_k);
  write_weights(x.router, logits, all, ids, x.top_k, scores, slopes);
}

// With s the scores, ds their gradients and dot = sum of s ds over the choices:
//   renormalize   dlogit_k = s_k (ds_k - dot / scale)
//   otherwise     dlogit_k = s_k ds_k; and with softmax -p_e dot for every e, p from the logits
// times d(log p_k) / dlogit_k, the slope, where p depends on its own logit alone. Weights whose sum
// is below its floor are divided by a constant: otherwise.
template <class F>
void gradient_row(RouterGradient const& x, int64_t token, F* out) {
  Router const& router = x.router;
  auto const [begin, end] = slots_of(x.token_offsets, slot_count(x), x.top_k, token);
  int64_t const count = end - begin;
  int32_t const* const ids = x.ids + begin;
  F const* const scores = static_cast<F const*>(x.scores) + begin;
  F const* const dscores = static_cast<F const*>(x.dscores) + begin;
  F const* const slopes = static_cast<F const*>(x.slopes) + begin;
  auto const valid = [&](int64_t k) { return ids[k] >= 0 && ids[k] < x.experts; };
  std::fill_n(out, x.experts, F(0));
  F dot = 0;
  bool any = false;
  for (int64_t k = 0; k < count; ++k) {
    if (valid(k)) any = true, dot += scores[k] * dscores[k];
  }
  if (!any) return;  // padding, whose logits may be NaN

  bool const softmax = router.score == Score::softmax;
  F const inverse = router.scale == 0 ? F(0) : 1 / F(router.scale);
  bool renormalized = router.renormalize;
  if (needs_logits(router)) {
    F const* const logits = rows_of<F>(x.logits, x.experts).row(token);
    Normalizer<F> const all(router.score, logits, x.experts);
    if (renormalized) renormalized = !is_floored(router, logits, all, x.experts, ids, count);
    if (softmax && !renormalized) {
      probabilities(router.score, logits, all, out, x.experts);
      for (int64_t e = 0; e < x.experts; ++e) out[e] *= -dot;
    }
  }
  for (int64_t k = 0; k < count; ++k) {
    if (!valid(k)) continue;
    F const d = renormalized ? dscores[k] - dot * inverse : dscores[k];
    out[ids[k]] += scores[k] * d * (softmax ? F(1) : slopes[k]);
  }
}

template <class F>
void gradient_token(RouterGradient const& x, int64_t token) {
  if (x.rounded_to == DType::float32) {
    return gradient_row(x, token, rows_of<F>(x.dlogits, x.experts).row(token));
  }
  Scratch scratch;
  float* const row = scratch.take<float>(x.experts);
  gradient_row(x, token, row);
  if (x.rounded_to == DType::bfloat16) {
    store(row, rows_of<bf16>(x.dlogits, x.experts).row(token), 1, x.experts);
  } else {
    store(row, rows_of<fp16>(x.dlogits, x.experts).row(token), 1, x.experts);
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
