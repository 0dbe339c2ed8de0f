// TMA stores of boxes that are known by their address in shared memory. PTX ISA, section
// "cp.async.bulk.tensor".
#pragma once
#include "cuda/arch/copy.cuh"

namespace guild::cuda {

// Elements outside the map are not written.
__device__ inline void tma_store_at(CUtensorMap const& map, uint32_t from, int x, int y, int z,
                                    int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

}  // namespace guild::cuda
