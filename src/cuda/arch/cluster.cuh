// Clusters of blocks: their barrier, and the shared memory of the other blocks. PTX ISA, sections
// "barrier.cluster", "mapa", "ld" and "st.async".
#pragma once
#include <bit>

#include "cuda/arch/barrier.cuh"

namespace guild::cuda {

// A cluster of more blocks needs a launch attribute of its own on compute capability 9.0, and may
// not fit there.
inline constexpr int kMostClusterBlocks = 8;

// Which block of its cluster this is, and a barrier of all the cluster's threads.
__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

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

// Writes to `to` in the block of this rank, asynchronously: its barrier `there` counts the four
// bytes when they have landed.
__device__ inline void store_to_block(int* to, int value, Barrier& there, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 address, barrier;\n"
      "mapa.shared::cluster.u32 address, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %1, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [address], %2, [barrier];\n"
      "}\n" ::"r"(shared_address(to)),
      "r"(shared_address(&there.word)), "r"(value), "r"(rank)
      : "memory");
}

}  // namespace guild::cuda
