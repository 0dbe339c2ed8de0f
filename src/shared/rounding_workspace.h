// The workspace of token rounding: what its kernels pass to each other.
#pragma once
#include <cstdint>

#include "shared/ceil_div.h"
#include "shared/rounding.h"
#include "shared/workspace.h"

namespace guild {

inline constexpr int64_t kListTokens = 32;  // tokens per block of lists: one bit each in a word

struct RoundingWorkspace {
  // int32 (E + 1 + blocks): tokens of each expert; tokens that are not padding; for each block, its
  // (token, expert) pairs
  void* counts;
  void* targets;    // RoundingTarget (E)
  void* softmaxes;  // two float (T)
  void* members;    // uint32 (blocks, E): which of a block's tokens an expert has
  void* keys;       // uint32 (E, T)
};
inline RoundingWorkspace carve_rounding(Carver& carver, int64_t tokens, int64_t experts) {
  int64_t const blocks = ceil_div(tokens, kListTokens);
  RoundingWorkspace w;
  w.counts = carver.take(experts + 1 + blocks, sizeof(int32_t));
  w.targets = carver.take(experts, sizeof(RoundingTarget));
  w.softmaxes = carver.take(tokens, 2 * sizeof(float));
  w.members = carver.take(blocks, experts, sizeof(uint32_t));
  w.keys = carver.take(experts, tokens, sizeof(uint32_t));
  return w;
}

}  // namespace guild
