// Launching kernels, each so that it comes as the one before it leaves.
//
// Programmatic dependent launch (CUDA C++ Programming Guide): the blocks of a kernel may start when
// those of the one before on the queue have all started and make room. So every kernel that
// launch_kernel() launches calls follow_previous() in every thread before it touches memory that
// another kernel writes or reads.
#pragma once
#include <cuda_runtime.h>

#include "guild/cuda.h"
#include "guild/error.h"

namespace guild::cuda {

inline void cuda_check(cudaError_t e, char const* what) {
  require(e == cudaSuccess, what, ": ", cudaGetErrorName(e), ": ", cudaGetErrorString(e));
}

// Lets the next kernel's blocks come, and waits until the kernel before has ended.
__device__ inline void follow_previous() {
  asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");
}

struct Grid {
  dim3 blocks;
  unsigned threads;      // of a block
  size_t shared = 0;     // dynamic shared memory, bytes
  unsigned cluster = 1;  // blocks of a cluster, unless the kernel says it itself
};

template <class... Parameters, class... Arguments>
void launch_kernel(char const* what, Queue const& queue, Grid const& grid,
                   void (*kernel)(Parameters...), Arguments const&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {grid.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared;
  config.stream = queue.stream;
  config.attrs = attributes;
  config.numAttrs = grid.cluster > 1 ? 2 : 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

}  // namespace guild::cuda
