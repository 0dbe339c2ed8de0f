// The counters from which launches claim tiles: numbers.cuh.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda::sm90 {

inline constexpr int kClaimCounters = 1 << 15;

// The counter from which a launch's blocks claim tiles, or -1 if it has none. `out` is what the
// launch writes. Nothing else may write it at that time, except another launch that shares the
// multiprocessors and has a queue counter of its own; so no other launch has this counter then.
int claims_of(void const* out, Queue const& queue);

}  // namespace guild::cuda::sm90
