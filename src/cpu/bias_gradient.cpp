// db[e] = sum over rows r of e of row_score[r] * M[row_token[r]]
#include "checks/check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

template <class T, class D>
void sum_columns(BiasGradient const& x, Block const& expert, Span cols) {
  using F = Compute<T>;
  if (expert.rows.count == 0 && x.accumulate) return;
  Scratch scratch;
  auto const m = rows_of<T>(x.m, x.width);
  auto const* const scores = static_cast<F const*>(x.routing.row_score);
  // In float64: an expert may have millions of rows.
  double* const sum = scratch.take<double>(cols.count);
  F* const row = scratch.take<F>(cols.count);
  std::fill_n(sum, cols.count, 0.);
  for (int64_t r = expert.rows.first; r < expert.rows.first + expert.rows.count; ++r) {
    bool const gathered = x.routing.row_token != nullptr;
    int64_t const from = gathered ? x.routing.row_token[r] : r;
    if (gathered && (from < 0 || from >= x.tokens)) continue;
    load(m.row(from) + cols.first, 1, row, cols.count);
    F const score = scores == nullptr ? F(1) : scores[r];
    for (int64_t j = 0; j < cols.count; ++j) sum[j] += score * row[j];
  }
  std::copy_n(sum, cols.count, row);
  D* const out = rows_of<D>(x.db, x.width).row(expert.expert) + cols.first;
  store(row, out, 1, cols.count, x.accumulate);
}

}  // namespace

void bias_gradient(BiasGradient const& x) {
  require_processor();
  check(x);
  auto const experts = group_rows(expert_groups(x.routing.offsets, x.experts, x.rows));
  with_elements(x.dtype, x.db_dtype, [&]<class T, class D>() {
    parallel_pairs(experts, spans(x.width, kBlockColumns), double(x.rows * x.width),
                   [&](Block const& expert, Span cols) { sum_columns<T, D>(x, expert, cols); });
  });
}

}  // namespace guild::cpu
