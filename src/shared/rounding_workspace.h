// What token rounding keeps between its kernels.
#pragma once
#include "compose.h"

namespace guild {

inline constexpr int64_t kListTokens = 32;  // of a block that writes lists

struct RoundingWorkspace {
  void* counts;      // int32 (E + 1): tokens of each expert, then those that are not padding
  void* targets;     // RoundingTarget (E)
  void* thresholds;  // two uint32 (E)
  void* softmaxes;   // two float (T)
  void* lengths;     // int32 (T) of the lists
  void* block_sums;  // int32 (blocks of kListTokens)
  void* keys;        // uint32 (E, T)
};
inline RoundingWorkspace carve_rounding(Carver& carver, int64_t tokens, int64_t experts) {
  RoundingWorkspace w;
  w.counts = carver.take((experts + 1) * 4);
  w.targets = carver.take(experts * 12);
  w.thresholds = carver.take(experts * 8);
  w.softmaxes = carver.take(tokens * 8);
  w.lengths = carver.take(tokens * 4);
  w.block_sums = carver.take((tokens + kListTokens - 1) / kListTokens * 4);
  w.keys = carver.take(experts * tokens * 4);
  return w;
}

}  // namespace guild
