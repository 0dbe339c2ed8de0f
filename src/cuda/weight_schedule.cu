// The schedule of the weight gradients: experts by decreasing number of rows, and the counters from
// which blocks claim tiles, set to zero. Longest processing time first: Graham, SIAM Journal on
// Applied Mathematics 17, 1969.
#include "checks/conditions.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;

// One block. An expert's place is the number of experts that come before it.
__global__ void __launch_bounds__(kThreads) weight_schedule_kernel(Groups groups,
                                                                   WeightSchedule schedule) {
  __shared__ int rows[kMostRouted];
  for (int e = threadIdx.x; e < groups.groups; e += kThreads) {
    int const begin = groups.start(e);
    rows[e] = groups.end(e, begin) - begin;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < groups.groups; e += kThreads) {
    int place = 0;
    for (int other = 0; other < groups.groups; ++other) {
      place += rows[other] > rows[e] || (rows[other] == rows[e] && other < e);
    }
    schedule.order[place] = e;
  }
  if (threadIdx.x < WeightSchedule::kCounters) schedule.taken[threadIdx.x] = 0;
}

}  // namespace

void schedule_weight_gradients(Sizes const& sizes, Routing const& routing,
                               WeightSchedule const& schedule, Queue queue) {
  check_size(sizes.experts, 1, kMostExperts, "experts");
  check_size(sizes.rows(), 0, kMostRows, "rows");
  require_routable(sizes.experts);
  require(routing.offsets != nullptr, "offsets: expected a buffer, got null");
  require(schedule.order != nullptr, "order: expected a buffer, got null");
  require(schedule.taken != nullptr, "taken: expected a buffer, got null");
  Groups const groups = expert_groups(routing.offsets, sizes.experts, sizes.rows());
  weight_schedule_kernel<<<1, kThreads, 0, queue.stream>>>(groups, schedule);
  cuda_check(cudaGetLastError(), "launch of schedule_weight_gradients");
}

}  // namespace guild::cuda
