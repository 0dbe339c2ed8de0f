// What L2 keeps, and what it forgets.
#pragma once
#include <cstdint>

namespace guild::cuda {

// Policies of loads and stores, by PTX's createpolicy: what is evicted before everything else, as
// usual, or only when there is nothing else.
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

// Drops a line of L2 without writing it to memory. Its values are undefined until they are written
// again. line: global memory, at a multiple of kLineBytes.
__device__ inline void discard_line(void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

}  // namespace guild::cuda
