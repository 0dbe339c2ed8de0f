// Programmatic dependent launch: a short kernel gets its blocks onto the multiprocessors while the
// one before it still runs. PTX ISA, section "griddepcontrol".
#pragma once
#include <utility>

namespace guild::cuda {

// From here on the next kernel of the stream may start if it was launched by launch_early().
__device__ inline void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernels before have completed: their results are visible, and what they read may
// be overwritten.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The kernel must wait_for_previous() before it touches global memory.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, int64_t bytes,
                         cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace guild::cuda
