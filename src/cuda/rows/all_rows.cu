// A kernel of one block that writes both offsets.
#include "cuda/rows/all_rows.h"

#include "cuda/arch/dependent_launch.cuh"
#include "cuda/launch.h"

namespace guild::cuda {
namespace {

__global__ void all_rows_kernel(int rows, int32_t* offsets) {
  wait_for_previous();
  let_next_start();
  offsets[threadIdx.x] = threadIdx.x == 0 ? 0 : rows;
}

}  // namespace

void all_rows(AllRows const& x, Queue queue) {
  cuda_check(launch_kernel(all_rows_kernel,
                           {.blocks = 1, .threads = 2, .stream = queue.stream, .early = true},
                           int(x.rows), x.offsets),
             "launch of all_rows");
}

}  // namespace guild::cuda
