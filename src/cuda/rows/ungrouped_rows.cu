// Clears the rows of a result that belong to no group: a kernel for rows of whole units of 16
// bytes, one for all others.
#include "cuda/rows/ungrouped_rows.h"

#include "cuda/device.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

// The ungrouped rows by number: those before the first group, then those after the last.
struct UngroupedIndex {
  int64_t first, last, count;

  __device__ explicit UngroupedIndex(UngroupedRows const& x)
      : first(x.first == nullptr ? 0 : min(max(int64_t(*x.first), int64_t(0)), x.rows)),
        last(min(max(int64_t(*x.last), first), x.rows)),
        count(first + x.rows - last) {}
  __device__ int64_t row(int64_t i) const { return i < first ? i : i - first + last; }
};

template <class Bits>
__global__ void clear_kernel(UngroupedRows x) {
  UngroupedIndex const rows(x);
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows.count * x.n;
       i += int64_t(gridDim.x) * blockDim.x) {
    static_cast<Bits*>(x.d)[rows.row(i / x.n) * x.row_stride + i % x.n * x.col_stride] = 0;
  }
}

// The same where rows are whole units of 16 bytes; stride and n in these.
__global__ void clear_units_kernel(UngroupedRows x) {
  UngroupedIndex const rows(x);
  for (int64_t i = blockIdx.x; i < rows.count; i += gridDim.x) {
    uint4* const row = static_cast<uint4*>(x.d) + rows.row(i) * x.row_stride;
    for (int64_t j = threadIdx.x; j < x.n; j += blockDim.x) row[j] = uint4{};
  }
}

constexpr int kThreads = 256;

}  // namespace

// Usually all rows belong to groups; then a block reads two numbers and exits.
void clear_ungrouped_rows(UngroupedRows const& x, Queue const& queue) {
  if (x.rows == 0 || x.n == 0) return;
  UngroupedRows units = x;
  int64_t const of_unit = int64_t(sizeof(uint4)) / x.element_bytes;
  units.row_stride /= of_unit;
  units.n /= of_unit;
  bool const whole = x.col_stride == 1 && x.n % of_unit == 0 && x.row_stride % of_unit == 0 &&
                     reinterpret_cast<uintptr_t>(x.d) % sizeof(uint4) == 0;
  unsigned const blocks = unsigned(multiprocessors(queue));
  if (whole) {
    clear_units_kernel<<<4 * blocks, kThreads, 0, queue.stream>>>(units);
  } else if (x.element_bytes == 4) {
    clear_kernel<uint32_t><<<blocks, kThreads, 0, queue.stream>>>(x);
  } else {
    clear_kernel<uint16_t><<<blocks, kThreads, 0, queue.stream>>>(x);
  }
  cuda_check(cudaGetLastError(), "launch of clear_ungrouped_rows");
}

}  // namespace guild::cuda
