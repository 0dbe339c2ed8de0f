#include "cuda/rows/clear_tail.h"

#include "cuda/device.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

// The rows of no group by number: those before the first group, then those after the last.
struct Nobodys {
  int64_t first, last, count;

  __device__ explicit Nobodys(Tail const& x)
      : first(x.first == nullptr ? 0 : min(max(int64_t(*x.first), int64_t(0)), x.rows)),
        last(min(max(int64_t(*x.last), first), x.rows)),
        count(first + x.rows - last) {}
  __device__ int64_t row(int64_t i) const { return i < first ? i : i - first + last; }
};

template <class Bits>
__global__ void clear_kernel(Tail x) {
  Nobodys const rows(x);
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows.count * x.n;
       i += int64_t(gridDim.x) * blockDim.x) {
    static_cast<Bits*>(x.d)[rows.row(i / x.n) * x.row_stride + i % x.n * x.col_stride] = 0;
  }
}

// The same where rows are whole units of 16 bytes; stride and n in these.
__global__ void clear_units_kernel(Tail x) {
  Nobodys const rows(x);
  for (int64_t i = blockIdx.x; i < rows.count; i += gridDim.x) {
    uint4* const row = static_cast<uint4*>(x.d) + rows.row(i) * x.row_stride;
    for (int64_t j = threadIdx.x; j < x.n; j += blockDim.x) row[j] = uint4{};
  }
}

constexpr int kThreads = 256;

}  // namespace

// Where all rows belong to groups, as is usual, a block reads two numbers and ends.
void clear_tail(Tail const& tail, Queue const& queue) {
  if (tail.rows == 0 || tail.n == 0) return;
  Tail units = tail;
  int64_t const of_unit = int64_t(sizeof(uint4)) / tail.element_bytes;
  units.row_stride /= of_unit;
  units.n /= of_unit;
  bool const whole = tail.col_stride == 1 && tail.n % of_unit == 0 &&
                     tail.row_stride % of_unit == 0 &&
                     reinterpret_cast<uintptr_t>(tail.d) % sizeof(uint4) == 0;
  unsigned const blocks = unsigned(multiprocessors(queue));
  if (whole) {
    clear_units_kernel<<<4 * blocks, kThreads, 0, queue.stream>>>(units);
  } else if (tail.element_bytes == 4) {
    clear_kernel<uint32_t><<<blocks, kThreads, 0, queue.stream>>>(tail);
  } else {
    clear_kernel<uint16_t><<<blocks, kThreads, 0, queue.stream>>>(tail);
  }
  cuda_check(cudaGetLastError(), "launch of clear_tail");
}

}  // namespace guild::cuda
