// A launch that records an event once all blocks of the kernel are running. CUDA Runtime API,
// "cudaLaunchAttributeLaunchCompletionEvent".
#pragma once
#include "cuda/device.h"

namespace guild::cuda {

struct Blocks {
  int64_t count;
  int threads, bytes;  // of one: its threads and dynamic shared memory
};

// begun: the event to record, or null.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), Blocks blocks, Queue const& queue, cudaEvent_t begun,
            Parameters... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(blocks.count);
  config.blockDim = unsigned(blocks.threads);
  config.dynamicSmemBytes = size_t(blocks.bytes);
  config.stream = queue.stream;
  cudaLaunchAttribute tells{};
  tells.id = cudaLaunchAttributeLaunchCompletionEvent;
  tells.val.launchCompletionEvent.event = begun;
  config.attrs = &tells;
  config.numAttrs = begun == nullptr ? 0 : 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, arguments...), "launch beside products");
}

}  // namespace guild::cuda
