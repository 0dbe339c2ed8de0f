// O[t] = residual_scale[t] * residual[t] + sum over k of slot_score[t, k] * Y[slot_row[t, k]] + the
// router's part of a gradient
#include "checks/check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

// sum += factor * row
template <class F>
void add(F* sum, F factor, F const* row, int64_t count) {
  for (int64_t j = 0; j < count; ++j) sum[j] += factor * row[j];
}

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
    if (x.residual_scale != nullptr) {
      F const scale = static_cast<F const*>(x.residual_scale)[token];
      T* const rounded = scratch.take<T>(hidden);
      for (int64_t j = 0; j < hidden; ++j) sum[j] *= scale;
      store(sum, rounded, 1, hidden);
      load(rounded, 1, sum, hidden);
    }
  }
  auto const slots = slots_of(x.routing.token_offsets, x.sizes.slot_count(), x.sizes.top_k, token);
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
    int32_t const r = x.routing.slot_row[slot];
    if (r < 0 || r >= x.sizes.rows()) continue;
    load(y.row(r), 1, row, hidden);
    add(sum, scores == nullptr ? F(1) : scores[slot], row, hidden);
  }
  if (x.router.dlogits.data != nullptr) {
    T const* const dlogits = rows_of<T>(x.router.dlogits, x.sizes.experts).row(token);
    auto const weight = rows_of<T>(x.router.weight, hidden);
    for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
      int32_t const id = x.router.ids[slot];
      if (id < 0 || id >= x.sizes.experts) continue;
      F dlogit;
      load(dlogits + id, 1, &dlogit, 1);
      load(weight.row(id), 1, row, hidden);
      add(sum, dlogit, row, hidden);
    }
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
