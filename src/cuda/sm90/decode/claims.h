// The counters from which launches claim tiles: numbers.cuh.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda::sm90 {

inline constexpr int kClaimCounters = 1 << 15;

// The counter from which a launch's blocks claim tiles, or -1 if none is left. `out` is what the
// launch writes. Nothing else may write it concurrently, except a launch that shares the GPU and
// has a queue counter of its own; so no two concurrent launches share a counter.
int claims_of(void const* out, Queue const& queue);

}  // namespace guild::cuda::sm90
