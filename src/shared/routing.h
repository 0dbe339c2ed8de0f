// The router's arithmetic for one expert: its rank, weight and slope; and the layout of slots, one
// per choice of a token. Host and device.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "guild/steps.h"
#include "shared/exponential.h"
#include "shared/host_device.h"

namespace guild {

// Maps floats to unsigned integers of the same order: -0 equals 0, NaN becomes 1, below -infinity;
// 0 is not used and marks "no candidate". order_of_number() is for values known not to be NaN.
GUILD_HD uint32_t order_of_number(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x + 0.f);
  uint32_t const flip = uint32_t(int32_t(bits) >> 31) | 0x80000000u;  // all bits of the negative
  return bits ^ flip;
}
GUILD_HD uint32_t order_of(float x) { return x != x ? 1 : order_of_number(x); }

// The inverse of order_of(), for orders other than 0.
GUILD_HD float value_of(uint32_t order) {
  if (order == 1) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(order >> 31 ? order & 0x7fffffffu : ~order);
}

// exp within 2 ulp. (The activations use __expf, which loses accuracy far from 0.)
GUILD_HD float exact_exp(float x) {
#ifdef __CUDA_ARCH__
  return expf(x);
#else
  return vector_exp(x);
#endif
}
GUILD_HD double exact_exp(double x) { return exp(x); }

// Square roots and quotients, within 2 ulp on a GPU: the correctly rounded versions call slow
// paths, around which registers spill.
GUILD_HD float square_root(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::sqrt(x);
#endif
}
GUILD_HD double square_root(double x) { return sqrt(x); }
GUILD_HD float quotient(float x, float y) {
#ifdef __CUDA_ARCH__
  return __fdividef(x, y);
#else
  return x / y;
#endif
}
GUILD_HD double quotient(double x, double y) { return x / y; }

// log(1 + x) / x for 0 <= x <= 1.
template <class F>
GUILD_HD F log_quotient(F x) {
  return x > 0 ? quotient(F(log1p(x)), x) : F(1);
}

// p of one expert, up to a factor common to all experts of the token:
//   softmax        exp(logit - shift)
//   sigmoid        sigmoid(logit) / exp(shift)
//   sqrt_softplus  sqrt(log(1 + exp(logit)) / exp(shift))
// Except for softmax, min(logit, 0) <= shift <= 0.
template <class F>
GUILD_HD F unscaled_weight(Score score, F logit, F shift) {
  F const below = logit - shift;
  // So far below 0, log(1 + exp(x)) rounds to exp(x), whose root exp(x / 2) does not underflow when
  // exp(x) does.
  bool const root_of_exp = score == Score::sqrt_softplus && below < F(-64);
  F const power = root_of_exp ? below / 2 : (logit < 0 ? logit : -logit);
  F const e = exact_exp(score == Score::softmax ? below : power);
  if (score == Score::softmax || root_of_exp) return e;
  F const above = logit < 0 ? (shift < 0 ? exact_exp(below) : e) : F(1);
  if (score == Score::sigmoid) return above / (1 + e);
  return square_root(logit < 0 ? above * log_quotient(e) : logit + F(log1p(e)));
}

// The shift for weights that are divided by their sum; it keeps the largest weight from underflow.
// top: the largest logit.
template <class F>
GUILD_HD F weight_shift(Score score, F top) {
  return score == Score::softmax || (top < 0 && top > -INFINITY) ? top : F(0);
}

// d(log p) / dlogit where p depends on the expert's own logit alone.
template <class F>
GUILD_HD F weight_slope(Score score, F logit) {
  if (score == Score::sigmoid) return unscaled_weight(score, -logit, F(0));  // 1 - p, unrounded
  F const e = exact_exp(logit < 0 ? logit : -logit);
  F const half = F(0.5) / (1 + e);
  return half / (logit < 0 ? log_quotient(e) : logit + F(log1p(e)));
}

// A token's slots: K of them, or, where token_offsets (T + 1) are given, those of its list, clipped
// to [0, slots).
struct SlotSpan {
  int64_t begin, end;
};
GUILD_HD SlotSpan slots_of(int32_t const* token_offsets, int64_t slots, int64_t top_k,
                           int64_t token) {
  if (token_offsets == nullptr) return {token * top_k, (token + 1) * top_k};
  int64_t const begin = token_offsets[token], end = token_offsets[token + 1];
  return {begin < 0 ? 0 : begin, end < slots ? end : slots};
}

// Which of `count` segments, which begin at offsets[0] <= offsets[1] <= ..., contains `at`: the
// last that begins at or before it, or segment 0.
GUILD_HD int64_t segment_of(int32_t const* offsets, int64_t count, int64_t at) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    int64_t const middle = (low + high) / 2;
    if (offsets[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The token of a slot.
GUILD_HD int64_t token_of(int32_t const* token_offsets, int64_t tokens, int64_t top_k,
                          int64_t slot) {
  if (token_offsets == nullptr) return int64_t(uint32_t(slot) / uint32_t(top_k));  // below 2^31
  return segment_of(token_offsets, tokens, slot);
}

// How many slots there are.
template <class Args>
GUILD_HD int64_t slot_count(Args const& x) {
  return Sizes{.tokens = x.tokens, .top_k = x.top_k, .slots = x.slots}.slot_count();
}
// The rows that a sort may write.
GUILD_HD int64_t row_count(Sort const& x) {
  return Sizes{.tokens = x.tokens, .top_k = x.top_k, .slots = x.slots, .room = x.room}.rows();
}
// The slots that belong to tokens.
GUILD_HD SlotSpan used_slots(Sort const& x) {
  int64_t const slots = slot_count(x);
  if (x.token_offsets == nullptr) return {0, slots};
  int64_t const begin = x.token_offsets[0], end = x.token_offsets[x.tokens];
  return {begin < 0 ? 0 : begin, end < slots ? end : slots};
}

// Whether experts are ranked by their logits, which have the order of p but do not tie where p
// rounds to the same value. With a bias or sums over groups, p itself is needed.
GUILD_HD bool ranked_by_logit(Route const& x) {
  bool const sums = x.router.groups > 1 && x.router.group_score == GroupScore::top2_sum;
  return x.selection_bias == nullptr && !sums;
}

// Whether weights are always divided by their sum, so that a common factor cancels.
GUILD_HD bool weighs_relatively(Router const& router) {
  return router.renormalize && router.sum_floor == 0;
}

}  // namespace guild
