#include "cuda/rows/clear_tail.h"

namespace guild::cuda {
namespace {

template <class Bits>
__global__ void clear_kernel(Tail x) {
  int64_t const first = max(*x.last, 0);
  int64_t const count = first < x.rows ? (x.rows - first) * x.n : 0;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * blockDim.x) {
    static_cast<Bits*>(x.d)[(first + i / x.n) * x.row_stride + i % x.n * x.col_stride] = 0;
  }
}

}  // namespace

void clear_tail(Tail const& tail, Queue const& queue) {
  auto const kernel = tail.element_bytes == 4 ? clear_kernel<uint32_t> : clear_kernel<uint16_t>;
  kernel<<<unsigned(multiprocessors(queue)), 256, 0, queue.stream>>>(tail);
  cuda_check(cudaGetLastError(), "launch of clear_tail");
}

}  // namespace guild::cuda
