// copy_indices(): host values that are passed to the device as arguments of a kernel.
#include <algorithm>
#include <iterator>

#include "cuda/device.h"
#include "shared/ceil_div.h"

namespace guild::cuda {
namespace {

// What a launch holds: kernels take up to 4 KiB of arguments on every driver.
struct Values {
  int32_t value[960];
};
static_assert(sizeof(Values) <= 3840);

__global__ void copy_indices_kernel(__grid_constant__ Values const from, int count, int32_t* to) {
  int const i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from.value[i];
}

}  // namespace

void copy_indices(int32_t const* from, int64_t count, int32_t* to, Queue queue) {
  require(count >= 0, "count: expected 0 or more, got ", count);
  require(count == 0 || from != nullptr, "from: expected a pointer, got null");
  require(count == 0 || to != nullptr, "to: expected a pointer, got null");
  constexpr int most = std::size(Values{}.value), threads = 128;
  for (int64_t first = 0; first < count; first += most) {
    int const part = int(std::min<int64_t>(count - first, most));
    Values values;
    std::copy_n(from + first, part, values.value);
    std::fill(values.value + part, std::end(values.value), 0);
    unsigned const blocks = unsigned(ceil_div(part, threads));
    copy_indices_kernel<<<blocks, threads, 0, queue.stream>>>(values, part, to + first);
    cuda_check(cudaGetLastError(), "launch of copy_indices");
  }
}

}  // namespace guild::cuda
