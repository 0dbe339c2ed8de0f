// L2 eviction priorities, and discarding of lines.
#pragma once
#include <cstdint>

namespace guild::cuda {

// Cache policies for loads and stores (PTX createpolicy).
__device__ inline uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t evict_normal() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

inline constexpr int kLineBytes = 128;

// Discards a line without writing it back. Its contents are undefined until it is written again.
// line: a global address, a multiple of kLineBytes.
__device__ inline void discard_line(void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

}  // namespace guild::cuda
