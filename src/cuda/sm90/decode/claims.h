// How many counters there are from which launches claim tiles.
#pragma once

namespace guild::cuda::sm90 {

inline constexpr int kClaimCounters = 1 << 15;

}  // namespace guild::cuda::sm90
