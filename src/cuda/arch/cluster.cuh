// Shared memory of the other blocks of a cluster. PTX ISA, sections "mapa" and "ld".
#pragma once
#include <bit>

#include "barrier.cuh"

namespace guild::cuda {

// `at` in the block of this rank: four bytes.
template <class T>
__device__ inline T load_from_block(T const* at, int rank) {
  static_assert(sizeof(T) == 4);
  uint32_t word;
  asm volatile(
      "{\n"
      ".reg .u32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [there];\n"
      "}"
      : "=r"(word)
      : "r"(shared_address(at)), "r"(rank)
      : "memory");
  return std::bit_cast<T>(word);
}

}  // namespace guild::cuda
