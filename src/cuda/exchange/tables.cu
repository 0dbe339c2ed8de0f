// What ranks tell each other about their tokens: tables, and the sort of few slots with them.
#include "checks/exchange.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/exchange/copies.h"
#include "cuda/require_runnable.h"
#include "cuda/routing/sort.cuh"
#include "shared/peer_memory.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;

// Slot i of rank r: its expert on this rank, or -1, and its score; both are also stored. at_once:
// reads the slot before it knows whether the rank has it, to save a round trip to the peer. Loads
// bypass L1, which may hold stale data if the kernel started early.
template <bool at_once>
__device__ SortedSlot take_slot(Tables const& x, PeerLayout const& layout, int r, int64_t i) {
  PeerMemory const& m = x.memory;
  PeerControl const* const own = PeerView(layout, m, m.rank).control();
  int64_t const place = last_place(own), slots = m.tokens * x.top_k;
  PeerView const peer(layout, m, r);
  bool const failed = own->failure != 0;
  int64_t const published = failed ? 0 : __ldcg(&peer.control()->tokens[place]);
  bool const there = i < slots && !failed && (at_once || i < published * x.top_k);
  int32_t const id = there ? __ldcg(peer.ids(place) + i) : -1;
  float const score = there ? __ldcg(reinterpret_cast<float*>(peer.scores(place)) + i) : 0.f;
  if (i == 0) x.tokens[r] = int32_t(published);
  if (i >= slots) return {};
  int64_t const local = x.experts / m.ranks;
  bool const here = i < published * x.top_k && lives_on(id, m.rank, local);
  SortedSlot const slot{{here ? int32_t(id - m.rank * local) : -1}, here ? score : 0.f};
  x.ids[r * slots + i] = slot.id.low;
  static_cast<float*>(x.scores)[r * slots + i] = slot.score;
  return slot;
}

// A thread for each slot; blockIdx.y is the rank.
__global__ void __launch_bounds__(kThreads) tables_kernel(Tables x, PeerLayout layout) {
  take_slot<false>(x, layout, int(blockIdx.y), blockIdx.x * int64_t(kThreads) + threadIdx.x);
}

// For sort_few_kernel: slots as the ranks have published them.
struct PublishedSlots {
  Tables tables;
  PeerLayout layout;

  __device__ SortedSlot load(Sort const& x, int64_t slot) const {
    if (slot >= slot_count(x)) return {};
    int64_t const of_rank = tables.memory.tokens * tables.top_k;
    return take_slot<true>(tables, layout, int(slot / of_rank), slot % of_rank);
  }
};

}  // namespace

void require_runnable(Tables const& x) {
  check(x);
  require(x.score_bytes == 4, "score_bytes: expected 4 on CUDA, got ", x.score_bytes);
}

void tables(Tables const& x, Queue queue) {
  require_runnable(x);
  int64_t const slots = x.memory.tokens * x.top_k;
  dim3 const blocks(unsigned(slots > 0 ? ceil_div(slots, kThreads) : 1), unsigned(x.memory.ranks));
  tables_kernel<<<blocks, kThreads, 0, queue.stream>>>(x, layout_of(x.memory));
  cuda_check(cudaGetLastError(), "launch of tables");
}

void tables_and_sort(Tables const& x, Sort const& sort, Queue const& queue) {
  require_runnable(x);
  require_runnable(sort);
  if (!are_few(slot_count(sort))) {
    tables(x, queue);
    return sort_by_expert(sort, queue);
  }
  sort_few(sort, PublishedSlots{x, layout_of(x.memory)}, /*waits_last=*/false, queue);
}

}  // namespace guild::cuda
