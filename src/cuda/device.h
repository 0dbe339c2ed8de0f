// The device as the host sees it: whether Guild's kernels run on it, how large it is, and what went
// wrong there.
#pragma once
#include <cuda_runtime.h>

#include "guild/cuda.h"

namespace guild::cuda {

inline void cuda_check(cudaError_t e, char const* what) {
  require(e == cudaSuccess, what, ": ", cudaGetErrorName(e), ": ", cudaGetErrorString(e));
}

// Whether there are kernels for this compute capability. Those of sm90/ are built as sm_90a
// (CMakeLists.txt), machine code that runs on 9.0 and nothing else.
constexpr bool supports(int major, int minor) { return major == 9 && minor == 0; }

// Multiprocessors that a launch on this queue may fill.
int multiprocessors(Queue const& queue);

}  // namespace guild::cuda
