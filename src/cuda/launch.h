// Kernel launches with attributes that <<<>>> cannot express: clusters, programmatic dependent
// launch, an event that is recorded once all blocks are running.
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
  // Programmatic dependent launch (arch/dependent_launch.cuh). The kernel must wait_for_previous()
  // before it writes global memory or reads what the preceding kernel writes. Before that it may
  // read what older kernels wrote, provided the preceding kernel waited before it let this one
  // start.
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
