// The barrier between ranks: one block, so that whatever other ranks are waiting for can run beside
// it, including NCCL's kernels.
//
// Thread r sends this rank's arrival to rank r's inbox and waits for rank r's in its own. What
// earlier kernels on this stream wrote, also to peers' memory, is visible to every rank that has
// acquired the arrival. PTX ISA, section "Memory Consistency Model".
#include <climits>

#include "checks/exchange.h"
#include "cuda/device.h"
#include "cuda/require_runnable.h"
#include "shared/peer_memory.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;

__device__ void store_release(int64_t* to, int64_t value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ int64_t load_acquire(int64_t const* from) {
  int64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ int64_t nanoseconds() {
  int64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Tells all ranks; the first failure counts.
__device__ void fail(Meet const& x, PeerLayout const& layout, int64_t word) {
  for (int r = 0; r < x.memory.ranks; ++r) {
    int64_t* const to = &PeerView(layout, x.memory, r).control()->failure;
    auto* const unsigned_to = reinterpret_cast<unsigned long long*>(to);
    atomicCAS_system(unsigned_to, 0ull, static_cast<unsigned long long>(word));
  }
}

__device__ void arrive(Meet const& x, PeerView const& peer, int64_t number) {
  PeerMessage& message = peer.control()->inbox[number & 1][x.memory.rank];
  for (int i = 0; i < kMostFacts; ++i) message.facts[i] = x.facts[i];
  __threadfence_system();
  store_release(&message.arrived, number);
}

__device__ void wait(Meet const& x, PeerLayout const& layout, PeerControl* own, int r,
                     int64_t number, int64_t limit) {
  PeerMessage const& message = own->inbox[number & 1][r];
  int64_t const began = nanoseconds();
  while (load_acquire(&message.arrived) < number) {
    if (load_acquire(&own->failure) != 0) return;
    if (nanoseconds() - began > limit) {
      return fail(x, layout, packed(PeerFailure::late, r, x.memory.rank, 0));
    }
    __nanosleep(40);
  }
  for (int i = 0; i < x.count; ++i) {
    if (message.facts[i] != x.facts[i]) {
      return fail(x, layout, packed(PeerFailure::differs, r, x.memory.rank, i));
    }
  }
}

// Writes the report for the host, to the host's memory.
__device__ void report(Meet const& x, int64_t word) {
  PeerReport const found = unpacked(word);
  x.report->rank = found.rank;
  x.report->reporter = found.reporter;
  x.report->fact = found.fact;
  x.report->rows = found.rows;
  __threadfence_system();
  store_release(&x.report->failure, found.failure);
}

__global__ void __launch_bounds__(kThreads) meet_kernel(Meet x, PeerLayout layout, int64_t limit) {
  PeerView const own(layout, x.memory, x.memory.rank);
  PeerControl* const control = own.control();
  int64_t const number = control->meetings + 1;
  int64_t const needed = x.needed == nullptr ? 0 : *x.needed;
  int const r = int(threadIdx.x);
  bool const stopped = control->stopped != 0;
  if (r == 0 && needed > x.capacity) {
    fail(x, layout, packed(PeerFailure::overflow, x.memory.rank, x.memory.rank, 0, needed));
  }
  __syncthreads();
  if (r < x.memory.ranks && !stopped) {  // others report what this rank says, failed or not
    arrive(x, PeerView(layout, x.memory, r), number);
    if (load_acquire(&control->failure) == 0) wait(x, layout, control, r, number, limit);
  }
  // One thread reads it for all: a rank that is ahead may set it for its next meeting meanwhile.
  __shared__ int64_t failure;
  __syncthreads();
  if (r == 0) failure = load_acquire(&control->failure);
  __syncthreads();
  int64_t const word = failure;
  if (r == 0 && !stopped) {
    control->meetings = number;
    control->published += x.published;
    control->stopped = word != 0;
  }
  if (word == 0) return;
  if (r == 0) report(x, word);  // again where an earlier barrier has found it
  uint4 const nan = {~0u, ~0u, ~0u, ~0u};
  int64_t const units = (layout.bytes - layout.returned) / int64_t(sizeof(uint4));
  for (int64_t i = r; i < units; i += kThreads) reinterpret_cast<uint4*>(own.returned())[i] = nan;
}

}  // namespace

void require_runnable(Meet const& x) { check(x); }

void meet(Meet const& x, Queue queue) {
  require_runnable(x);
  double const limit = x.seconds * 1e9;
  meet_kernel<<<1, kThreads, 0, queue.stream>>>(x, layout_of(x.memory),
                                                limit < 9e18 ? int64_t(limit) : LLONG_MAX);
  cuda_check(cudaGetLastError(), "launch of meet");
}

}  // namespace guild::cuda
