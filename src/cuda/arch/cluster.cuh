// Clusters of blocks: their barrier, and the shared memory of the other blocks. PTX ISA, sections
// "barrier.cluster", "mapa", "ld" and "st.async".
#pragma once
#include <bit>

#include "cuda/arch/barrier.cuh"

namespace guild::cuda {

// The portable cluster size. Larger clusters must be enabled for each kernel
// (cudaFuncAttributeNonPortableClusterSizeAllowed) and may not fit on the device.
inline constexpr int kMostClusterBlocks = 8;

// This block's rank in its cluster, and a barrier for all threads of the cluster.
__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Reads a four-byte value from the shared memory of block `rank`: the one at `at` there.
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

// Stores asynchronously to `to` in block `rank`. Completes four bytes of transaction count on that
// block's copy of `there`.
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
