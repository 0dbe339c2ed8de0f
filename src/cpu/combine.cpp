// O[t] = residual[t] + sum over k of slot_score[t, k] * Y[slot_row[t, k]], k ascending
#include "check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

template <class T>
void combine_token(Combine const& x, int64_t token) {
  using F = Compute<T>;
  Scratch scratch;
  int64_t const hidden = x.sizes.hidden;
  auto const y = rows_of<T>(x.y, hidden);
  auto const* const scores = static_cast<F const*>(x.routing.slot_score);
  F* const sum = scratch.take<F>(hidden);
  F* const row = scratch.take<F>(hidden);
  if (x.residual.data == nullptr) {
    std::fill_n(sum, hidden, F(0));
  } else {
    load(rows_of<T>(x.residual, hidden).row(token), 1, sum, hidden);
  }
  auto const slots = slots_of(x.routing.token_offsets, x.sizes.rows(), x.sizes.top_k, token);
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
    int32_t const r = x.routing.slot_row[slot];
    if (r < 0) continue;
    load(y.row(r), 1, row, hidden);
    F const score = scores == nullptr ? F(1) : scores[slot];
    for (int64_t j = 0; j < hidden; ++j) sum[j] += score * row[j];
  }
  store(sum, rows_of<T>(x.o, hidden).row(token), 1, hidden);
}

}  // namespace

void combine(Combine const& x) {
  require_processor();
  check(x);
  auto const tokens = spans(x.sizes.tokens, kBlockRows);
  with_element(x.dtype, [&]<class T>() {
    parallel(int64_t(tokens.size()), double(x.sizes.rows() * x.sizes.hidden), [&](int64_t i) {
      for (int64_t t = 0; t < tokens[i].count; ++t) combine_token<T>(x, tokens[i].first + t);
    });
  });
}

}  // namespace guild::cpu
