// Kernels that are one cluster of blocks.
#pragma once
#include <utility>

#include "cuda/arch/cluster.cuh"

namespace guild::cuda {

// cluster_barrier() in two halves.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Started as launch_early() does. blocks: a power of two, kMostClusterBlocks at most.
template <class... Parameters, class... Arguments>
cudaError_t launch_one_cluster(void (*kernel)(Parameters...), unsigned blocks, int threads,
                               int64_t bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = blocks > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace guild::cuda
