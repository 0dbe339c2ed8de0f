// Contiguous bulk copies by TMA, without a tensor map. PTX ISA, section "cp.async.bulk".
#pragma once
#include "cuda/arch/barrier.cuh"

namespace guild::cuda {

// Copies `bytes` from global to shared memory and completes on the mbarrier at `done`. Both
// addresses and the size are multiples of 16.
__device__ inline void bulk_load(uint32_t to, void const* from, uint32_t bytes, uint32_t done) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(done)
      : "memory");
}

}  // namespace guild::cuda
