// The router's arithmetic on one expert: what ranks it, and what it weighs. Host and device.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "guild/steps.h"
#include "shared/activation.h"

namespace guild {

// Unsigned integers in the order of numbers: -0 equals 0, NaN is 0 and below -infinity.
GUILD_HD uint32_t order_of(float x) {
  if (x != x) return 0;
  uint32_t const bits = std::bit_cast<uint32_t>(x + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// An expert and its key as one integer: the greater one is the better one, that is the one of the
// greater key, then of the smaller id. 0 is below every expert.
GUILD_HD uint64_t candidate(float key, int id) {
  return uint64_t(order_of(key)) << 32 | uint32_t(~id);
}
GUILD_HD int candidate_id(uint64_t c) { return ~int(uint32_t(c)); }

// e / size by a multiplication, for 0 <= e < 1024 and 1 <= size <= 1024.
struct GroupOf {
  uint32_t inverse;
  explicit constexpr GroupOf(int size) : inverse(((1u << 20) + size - 1) / uint32_t(size)) {}
  GUILD_HD int operator()(int e) const { return int((uint32_t(e) * inverse) >> 20); }
};

// exp within an ulp or two; the activations' __expf is less exact far from 0.
GUILD_HD float exact_exp(float x) {
#ifdef __CUDA_ARCH__
  return expf(x);
#else
  return vector_exp(x);
#endif
}
GUILD_HD double exact_exp(double x) { return exp(x); }

// p of one expert up to a factor that all of a token share:
//   softmax    exp(logit - shift)
//   sigmoid    sigmoid(logit) / exp(shift), shift <= 0 and not below the logit if that is negative
// Where weights are divided by their sum, a shift at the largest of them keeps it from underflow.
template <class F>
GUILD_HD F unscaled_weight(Score score, F logit, F shift) {
  F const e = exact_exp(score == Score::softmax ? logit - shift : (logit < 0 ? logit : -logit));
  if (score == Score::softmax) return e;
  if (!(logit < 0)) return 1 / (1 + e);
  return (shift < 0 ? exact_exp(logit - shift) : e) / (1 + e);
}

// Whether experts are ranked by their logits, in the order of p: exact where p rounds to a tie. A
// bias or a sum over a group needs p itself.
GUILD_HD bool ranked_by_logit(Route const& x) {
  return x.selection_bias == nullptr && x.router.groups == 1;
}

}  // namespace guild
