// Stable counting sort of slots by expert, in slot order on one thread.
#include <algorithm>

#include "checks/check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

// Once the offsets are known.
int64_t used_rows(Sort const& x) { return std::min<int64_t>(x.offsets[x.experts], row_count(x)); }

template <class Id>
void sort_ids(Sort const& x) {
  Scratch scratch;
  int64_t const slots = slot_count(x), rows = row_count(x);
  SlotSpan const of_tokens = used_slots(x);
  auto const* const ids = static_cast<Id const*>(x.ids);
  auto const valid = [&](int64_t slot) {
    bool const used = slot >= of_tokens.begin && slot < of_tokens.end;
    return used && ids[slot] >= 0 && ids[slot] < x.experts;
  };

  std::fill_n(x.offsets, x.experts + 1, 0);
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (valid(slot)) ++x.offsets[ids[slot] + 1];
  }
  for (int64_t e = 0; e < x.experts; ++e) x.offsets[e + 1] += x.offsets[e];

  auto* const next_row = scratch.take<int32_t>(x.experts);  // of each expert
  std::copy_n(x.offsets, x.experts, next_row);
  for (int64_t slot = 0; slot < slots; ++slot) {
    int32_t const next = valid(slot) ? next_row[ids[slot]]++ : -1, row = next < rows ? next : -1;
    x.slot_row[slot] = row;
    if (row >= 0) x.row_token[row] = int32_t(token_of(x.token_offsets, x.tokens, x.top_k, slot));
  }
  std::fill(x.row_token + used_rows(x), x.row_token + rows, 0);
}

template <class F>
void sort_scores(Sort const& x) {
  int64_t const slots = slot_count(x);
  auto const* const scores = static_cast<F const*>(x.scores);
  auto* const row_score = static_cast<F*>(x.row_score);
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (x.slot_row[slot] >= 0) row_score[x.slot_row[slot]] = scores[slot];
  }
  std::fill(row_score + used_rows(x), row_score + row_count(x), F(0));
}

}  // namespace

void sort_by_expert(Sort const& x) {
  require_processor();
  check(x);
  x.ids_are_int64 ? sort_ids<int64_t>(x) : sort_ids<int32_t>(x);
  if (x.scores == nullptr) return;
  x.score_dtype == DType::float64 ? sort_scores<double>(x) : sort_scores<float>(x);
}

}  // namespace guild::cpu
