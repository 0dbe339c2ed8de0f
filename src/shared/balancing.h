// Chunks of a sequence's tokens: one thread block and one partial sum each.
#pragma once
#include <algorithm>
#include <cstdint>

#include "shared/ceil_div.h"
#include "shared/workspace.h"

namespace guild {

inline constexpr int64_t kBalanceBlocks = 256;      // for all sequences, at least one for each
inline constexpr int64_t kLeastBalanceTokens = 16;  // per chunk, unless the sequence has fewer

constexpr int64_t balance_chunks(int64_t tokens, int64_t sequences) {
  int64_t const most = ceil_div(tokens / sequences, kLeastBalanceTokens);
  return std::min(most, std::max<int64_t>(1, kBalanceBlocks / sequences));
}

// Partial sums of every chunk; the chunks of a sequence are contiguous and in order.
struct BalanceWorkspace {
  void *shares, *squares, *counts;  // float (chunks, E), float (chunks), int32 (chunks, E)
};
inline BalanceWorkspace carve_balance(Carver& carver, int64_t tokens, int64_t experts,
                                      int64_t sequences) {
  int64_t const chunks = balance_chunks(tokens, sequences) * sequences;
  void* const shares = carver.take(chunks, experts, sizeof(float));
  void* const squares = carver.take(chunks, sizeof(float));
  return {shares, squares, carver.take(chunks, experts, sizeof(int32_t))};
}

}  // namespace guild
