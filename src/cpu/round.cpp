// Token rounding: whole tiles of tokens for every expert, then each token's list of experts.
#include <algorithm>
#include <cmath>
#include <vector>

#include "checks/check.h"
#include "cpu/router_weights.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/rounding.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

template <class F>
class Rounder {
 public:
  explicit Rounder(TokenRounding const& x)
      : x_(x),
        logits_(rows_of<F>(x.logits, x.experts)),
        normalizer_(x.tokens),
        member_(x.tokens * x.experts) {}

  void run() {
    std::vector<int64_t> counts(x_.experts);
    std::vector<int32_t> tokens;  // without padding
    for (int64_t t = 0; t < x_.tokens; ++t) {
      if (!in_range(x_.ids[t * x_.top_k])) continue;
      tokens.push_back(int32_t(t));
      normalizer_[t] = {x_.router.score, logits_.row(t), x_.experts};
      for (int64_t slot = t * x_.top_k; slot < (t + 1) * x_.top_k; ++slot) {
        if (!in_range(x_.ids[slot])) continue;
        ++counts[x_.ids[slot]];
        member_[t * x_.experts + x_.ids[slot]] = 1;
      }
    }
    int64_t before = 0;
    uint64_t const seed = x_.seed == nullptr ? 0 : uint64_t(*x_.seed);
    for (int64_t e = 0; e < x_.experts; before += counts[e++]) {
      int64_t const rounded = rounded_count(x_.rounding, x_.tile, counts[e], before, seed, e);
      select(e, rounding_target(counts[e], rounded, int64_t(tokens.size())), tokens);
    }
    write_lists();
  }

 private:
  bool in_range(int32_t id) const { return id >= 0 && id < x_.experts; }

  // Makes the best candidates members of the expert, and the other candidates not.
  void select(int64_t expert, RoundingTarget target, std::vector<int32_t> const& tokens) {
    std::vector<std::pair<F, int32_t>> candidates;
    for (int32_t t : tokens) {
      auto& member = member_[t * x_.experts + expert];
      if (member == target.adds) continue;
      Normalizer<F> const& all = normalizer_[t];
      candidates.push_back(
          {rounding_key(logits_.row(t)[expert], all.shift, F(std::log(all.sum))), t});
      member = 0;
    }
    auto const better = [](auto const& a, auto const& b) {  // NaN last
      bool const a_nan = a.first != a.first, b_nan = b.first != b.first;
      if (a_nan != b_nan) return b_nan;
      if (!a_nan && a.first != b.first) return a.first > b.first;
      return a.second < b.second;
    };
    std::sort(candidates.begin(), candidates.end(), better);
    int64_t const kept = std::min<int64_t>(target.select, int64_t(candidates.size()));
    for (int64_t i = 0; i < kept; ++i) member_[candidates[i].second * x_.experts + expert] = 1;
  }

  void write_lists() {
    int64_t const slots = rounded_slots(x_.tokens, x_.experts, x_.top_k, x_.rounding, x_.tile);
    int64_t next = 0;
    for (int64_t t = 0; t < x_.tokens; ++t) {
      x_.token_offsets[t] = int32_t(next);
      int64_t const first = next;
      for (int64_t e = 0; e < x_.experts; ++e) {
        if (member_[t * x_.experts + e]) x_.list_ids[next++] = int32_t(e);
      }
      F* const slopes = x_.slopes == nullptr ? nullptr : this->slopes() + first;
      write_weights(x_.router, logits_.row(t), normalizer_[t], x_.list_ids + first, next - first,
                    scores() + first, slopes);
    }
    x_.token_offsets[x_.tokens] = int32_t(next);
    std::fill(x_.list_ids + next, x_.list_ids + slots, -1);
    std::fill(scores() + next, scores() + slots, F(0));
    if (x_.slopes != nullptr) std::fill(slopes() + next, slopes() + slots, F(0));
  }

  F* scores() const { return static_cast<F*>(x_.scores); }
  F* slopes() const { return static_cast<F*>(x_.slopes); }

  TokenRounding const& x_;
  TypedRows<F const> logits_;
  std::vector<Normalizer<F>> normalizer_;  // (T)
  std::vector<uint8_t> member_;            // (T, E)
};

}  // namespace

void round_tokens(TokenRounding const& x) {
  require_processor();
  check(x);
  x.dtype == DType::float64 ? Rounder<double>(x).run() : Rounder<float>(x).run();
}

}  // namespace guild::cpu
