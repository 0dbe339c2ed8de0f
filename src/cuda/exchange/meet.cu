// The barrier between ranks. It takes one block, so that whatever other ranks are waiting for, such
// as NCCL's kernels, can run beside it.
//
// Thread r sends this rank's arrival to rank r's inbox, and waits for rank r's arrival in its own.
// Writes of earlier kernels on this stream, to peers' memory too, are visible to every rank that
// has acquired the arrival. PTX ISA, section "Memory Consistency Model".
//
// An arrival is one 16-byte store of the barrier's number and a digest of the facts, the values on
// which ranks must agree; while they do, nothing else has to travel. The facts follow, for the
// host's error messages: a rank that receives a different digest reads them in the sender's memory.
#include <climits>

#include "checks/exchange.h"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/require_runnable.h"
#include "shared/peer_memory.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;

struct Arrival {
  int64_t digest, number;  // as PeerMessage's last two words
};
static_assert(offsetof(PeerMessage, digest) % 16 == 0 && sizeof(PeerMessage) % 16 == 0 &&
              offsetof(PeerMessage, arrived) == offsetof(PeerMessage, digest) + 8);

__device__ void store_release(PeerMessage& to, Arrival const& arrival) {
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "mov.b128 both, {%1, %2};\n"
      "st.release.sys.global.b128 [%0], both;\n"
      "}" ::"l"(&to.digest),
      "l"(arrival.digest), "l"(arrival.number)
      : "memory");
}
__device__ Arrival load_acquire(PeerMessage const& from) {
  Arrival arrival;
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "ld.acquire.sys.global.b128 both, [%2];\n"
      "mov.b128 {%0, %1}, both;\n"
      "}"
      : "=l"(arrival.digest), "=l"(arrival.number)
      : "l"(&from.digest)
      : "memory");
  return arrival;
}

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

// Tells rank r that this one has arrived. Its own facts are in its own memory by now.
__device__ void arrive(Meet const& x, PeerView const& peer, int r, Arrival const& arrival) {
  PeerMessage& message = peer.control()->inbox[arrival.number & 1][x.memory.rank];
  store_release(message, arrival);
  if (r == x.memory.rank) return;
  for (int i = 0; i < kMostFacts; ++i) message.facts[i] = x.facts[i];
}

// Finds out why rank r, which has arrived, does not say the same.
__device__ void find_difference(Meet const& x, PeerLayout const& layout, int r,
                                Arrival const& found) {
  PeerControl* const peer = PeerView(layout, x.memory, r).control();
  if (found.digest == 0) return fail(x, layout, load_acquire(&peer->failure));
  for (int i = 0; i < kMostFacts; ++i) {
    if (load_acquire(&peer->inbox[found.number & 1][r].facts[i]) != x.facts[i]) {
      return fail(x, layout, packed(PeerFailure::differs, r, x.memory.rank, i));
    }
  }
}

// Waits for rank r. Whether it says the same as this one; if not, and if it is late, all ranks are
// told.
__device__ bool agrees(Meet const& x, PeerLayout const& layout, PeerControl* own, int r,
                       Arrival const& said, int64_t limit) {
  PeerMessage const& message = own->inbox[said.number & 1][r];
  int64_t const began = nanoseconds();
  for (;;) {
    Arrival const found = load_acquire(message);
    if (found.number >= said.number) {
      if (found.digest == said.digest) return true;
      find_difference(x, layout, r, found);
      return false;
    }
    if (load_acquire(&own->failure) != 0) return false;
    if (nanoseconds() - began > limit) {
      fail(x, layout, packed(PeerFailure::late, r, x.memory.rank, 0));
      return false;
    }
    __nanosleep(40);
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

__global__ void __launch_bounds__(kThreads) meet_kernel(Meet x, PeerLayout layout, int64_t digest,
                                                        int64_t limit) {
  int const r = int(threadIdx.x), rank = int(x.memory.rank);
  bool const is_peer = r < x.memory.ranks;
  PeerView const own(layout, x.memory, rank), peer(layout, x.memory, is_peer ? r : rank);
  PeerControl* const control = own.control();
  wait_for_previous();
  let_next_start();
  int64_t const number = control->meetings + 1, needed = x.needed == nullptr ? 0 : *x.needed;
  bool const stopped = control->stopped != 0, overflows = needed > x.capacity;
  bool const failed = overflows || load_acquire(&control->failure) != 0;
  if (r < kMostFacts && !stopped) control->inbox[number & 1][rank].facts[r] = x.facts[r];
  if (r == 0 && overflows) {
    fail(x, layout, packed(PeerFailure::overflow, rank, rank, 0, needed));
  }
  __syncthreads();
  bool fine = !failed;
  Arrival const said{failed ? 0 : digest, number};
  if (is_peer && !stopped) {  // others report what this rank says, failed or not
    arrive(x, peer, r, said);
    if (fine) fine = agrees(x, layout, control, r, said, limit);
  }
  // One thread reads it for all: a rank that is ahead may already set it for its next barrier.
  __shared__ int64_t failure;
  fine = __syncthreads_and(fine);
  if (r == 0) failure = fine ? 0 : load_acquire(&control->failure);
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

void meet(Meet const& given, Queue queue) {
  require_runnable(given);
  Meet const x = with_all_facts(given);
  double const limit = x.seconds * 1e9;
  cuda_check(
      launch_kernel(
          meet_kernel, {.blocks = 1, .threads = kThreads, .stream = queue.stream, .early = true}, x,
          layout_of(x.memory), facts_digest(x.facts), limit < 9e18 ? int64_t(limit) : LLONG_MAX),
      "launch of meet");
}

}  // namespace guild::cuda
