// Launches of kernels with attributes that <<<>>> has no place for: clusters of blocks, an early
// start, an event that tells when all blocks are running.
#pragma once
#include <utility>

#include "cuda/device.h"

namespace guild::cuda {

struct Launch {
  dim3 blocks;
  int threads;        // of a block
  int64_t bytes = 0;  // of a block's dynamic shared memory
  cudaStream_t stream;
  int cluster = 1;  // blocks of a cluster, which divides the number of blocks
  // By programmatic dependent launch (arch/dependent_launch.cuh): the kernel must
  // wait_for_previous() before it writes global memory, or reads what the kernel before it writes.
  // What older kernels wrote it may read earlier if the one before waited before it let this start.
  bool early = false;
  // Recorded once all blocks are running, unless null. CUDA Runtime API,
  // "cudaLaunchAttributeLaunchCompletionEvent".
  cudaEvent_t begun = nullptr;
};

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), Launch const& launch,
                          Arguments&&... arguments) {
  cudaLaunchAttribute attributes[3]{};
  cudaLaunchConfig_t config{};
  config.gridDim = launch.blocks;
  config.blockDim = dim3(unsigned(launch.threads));
  config.dynamicSmemBytes = size_t(launch.bytes);
  config.stream = launch.stream;
  config.attrs = attributes;
  auto const add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    cudaLaunchAttribute& added = attributes[config.numAttrs++];
    added.id = id;
    return added.val;
  };
  if (launch.early) {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  }
  if (launch.cluster > 1) {
    add(cudaLaunchAttributeClusterDimension).clusterDim = {unsigned(launch.cluster), 1, 1};
  }
  if (launch.begun != nullptr) {
    add(cudaLaunchAttributeLaunchCompletionEvent).launchCompletionEvent.event = launch.begun;
  }
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace guild::cuda
