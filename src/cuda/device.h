// The device as the host sees it: whether Guild's kernels run on it, how large it is, and what went
// wrong there.
#pragma once
#include <cuda_runtime.h>

#include "guild/cuda.h"

namespace guild::cuda {

inline void cuda_check(cudaError_t e, char const* what) {
  if (e == cudaSuccess) return;  // before the driver is asked for names
  require(false, what, ": ", cudaGetErrorName(e), ": ", cudaGetErrorString(e));
}

// Multiprocessors that a launch on this queue may fill.
int multiprocessors(Queue const& queue);

}  // namespace guild::cuda
