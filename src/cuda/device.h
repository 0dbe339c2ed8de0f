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
// The size of the current device's L2.
int64_t l2_bytes();

// The tile counters of a composite's products, one each. All are cleared when the first product
// asks for its own: clearing takes 2 us, and starting a kernel after it 1.5 us more.
struct Counters {
  int32_t* first = nullptr;  // null: none
  int64_t count = 0;
  int64_t left = 0;  // that have been cleared and not been given to a product
};

// The counter of the next product on this queue, 0 by then; null: it has none.
int32_t* cleared_counter(Queue const& queue);

}  // namespace guild::cuda
