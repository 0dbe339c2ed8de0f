// dscores[t, k] = sum of score_parts[r] + <dO[t], b2[e of r]>, r = slot_row[t, k]
#include <algorithm>

#include "checks/check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

template <class T>
Compute<T> bias_product(ScoreGradient const& x, int64_t token, int32_t row) {
  using F = Compute<T>;
  Scratch scratch;
  int64_t const hidden = x.sizes.hidden;
  int32_t const* const ends = x.routing.offsets + 1;
  int64_t const expert = std::upper_bound(ends, ends + x.sizes.experts - 1, row) - ends;
  F *const dout = scratch.take<F>(hidden), *const bias = scratch.take<F>(hidden);
  load(rows_of<T>(x.dout, hidden).row(token), 1, dout, hidden);
  load(rows_of<T>(x.bias, hidden).row(expert), 1, bias, hidden);
  F sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < hidden; ++j) sum += dout[j] * bias[j];
  return sum;
}

template <class T>
Compute<T> slot_gradient(ScoreGradient const& x, int64_t slot) {
  using F = Compute<T>;
  int32_t const row = x.routing.slot_row[slot];
  if (row < 0 || row >= x.sizes.rows() || x.sizes.tokens == 0) return 0;
  int64_t const parts = score_parts(x.sizes);
  auto const* const first = static_cast<F const*>(x.score_parts) + row * parts;
  F sum = 0;
  for (int64_t p = 0; p < parts; ++p) sum += first[p];
  if (x.bias.data == nullptr) return sum;
  Sizes const& s = x.sizes;
  return sum + bias_product<T>(x, token_of(x.routing.token_offsets, s.tokens, s.top_k, slot), row);
}

}  // namespace

void score_gradient(ScoreGradient const& x) {
  require_processor();
  check(x);
  auto const slots = spans(x.sizes.slot_count(), kBlockRows);
  with_element(x.dtype, [&]<class T>() {
    parallel(int64_t(slots.size()), double(x.sizes.rows() * x.sizes.hidden), [&](int64_t i) {
      auto* const out = static_cast<Compute<T>*>(x.dscores);
      for (int64_t s = slots[i].first; s < slots[i].first + slots[i].count; ++s) {
        out[s] = slot_gradient<T>(x, s);
      }
    });
  });
}

}  // namespace guild::cpu
