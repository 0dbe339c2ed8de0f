// What ranks tell each other, and rows from those that have them: publish, tables, pull.
//
// A warp copies a row, 16 bytes a lane and eight of them in flight: with all warps of the GPU about
// as many bytes as NVLink's bandwidth times its latency needs, many times over. Beside products a
// few multiprocessors do, so a block of pull() takes one whole. Rows of different ranks alternate,
// so that links and own memory are busy at once. Peers' memory is read with plain loads: the
// kernels start after the barrier, and no first-level cache holds anything older.
#include <algorithm>

#include "check_exchange.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "shared/peer_memory.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPullThreads = 1024, kPullWarps = kPullThreads / 32;
constexpr int kAtOnce = 8;  // 16-byte words that a lane loads before it stores them

__device__ void copy_row(void* to, void const* from, int units) {
  int const lane = threadIdx.x % 32;
  uint4* target = static_cast<uint4*>(to) + lane;
  uint4 const* source = static_cast<uint4 const*>(from) + lane;
  for (int left = units - lane; left > 0; left -= 32 * kAtOnce) {
    uint4 words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (32 * i < left) words[i] = source[32 * i];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (32 * i < left) target[32 * i] = words[i];
    }
    source += 32 * kAtOnce;
    target += 32 * kAtOnce;
  }
}

__device__ void fill_row(void* to, int units, unsigned value) {
  for (int i = threadIdx.x % 32; i < units; i += 32) {
    static_cast<uint4*>(to)[i] = {value, value, value, value};
  }
}

// A warp for each token.
__global__ void __launch_bounds__(kThreads) publish_kernel(Publish x, PeerLayout layout) {
  PeerMemory const& m = x.memory;
  PeerView const own(layout, m, m.rank);
  int64_t const place = next_place(own.control());
  int64_t const t = blockIdx.x * int64_t(kWarps) + threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (t == 0 && lane == 0) own.control()->tokens[place] = x.tokens;
  if (t >= x.tokens) return;
  copy_row(own.rows(place) + t * x.row_bytes, static_cast<char const*>(x.rows) + t * x.row_stride,
           int(x.row_bytes / 16));
  if (x.ids == nullptr) return;
  int32_t const* const ids = x.ids + t * x.top_k;
  float const* const scores = static_cast<float const*>(x.scores) + t * x.top_k;
  for (int k = lane; k < x.top_k; k += 32) {
    own.ids(place)[t * x.top_k + k] = ids[k];
    reinterpret_cast<float*>(own.scores(place))[t * x.top_k + k] = scores[k];
  }
  int64_t const local = x.experts / m.ranks;
  bool goes = false;
  for (int k = 0; k < x.top_k; ++k) goes |= lives_on(ids[k], lane, local);
  if (lane < m.ranks) {
    x.token_row[t * m.ranks + lane] = goes ? int32_t(lane * x.tokens + t) : -1;
  }
}

// A thread for each slot; blockIdx.y is the rank.
__global__ void __launch_bounds__(kThreads) tables_kernel(Tables x, PeerLayout layout) {
  PeerMemory const& m = x.memory;
  PeerControl const* const own = PeerView(layout, m, m.rank).control();
  int64_t const place = last_place(own), slots = m.tokens * x.top_k;
  int const r = int(blockIdx.y);
  PeerView const peer(layout, m, r);
  int64_t const tokens = own->failure != 0 ? 0 : peer.control()->tokens[place];
  int64_t const i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i == 0) x.tokens[r] = int32_t(tokens);
  if (i >= slots) return;
  int64_t const local = x.experts / m.ranks;
  bool const there = i < tokens * x.top_k;
  int32_t const id = there ? peer.ids(place)[i] : -1;
  float const score = there ? reinterpret_cast<float const*>(peer.scores(place))[i] : 0.f;
  bool const here = there && lives_on(id, m.rank, local);
  x.ids[r * slots + i] = here ? int32_t(id - m.rank * local) : -1;
  static_cast<float*>(x.scores)[r * slots + i] = here ? score : 0.f;
}

// Row i in the order in which warps take them: rows of all ranks alternate, beginning with the next
// rank's.
__device__ void pull_row(Pull const& x, PeerLayout const& layout, bool failed, int i) {
  PeerMemory const& m = x.memory;
  int const t = i / int(m.ranks), r = (i + int(m.rank) + 1) % int(m.ranks);
  int64_t const p = r * m.tokens + t;
  unsigned least = ~0u;  // of the token's experts here; -1 as unsigned: none
  for (int k = threadIdx.x % 32; k < x.top_k; k += 32) {
    least = min(least, unsigned(x.ids[p * x.top_k + k]));
  }
  least = __reduce_min_sync(~0u, least);
  bool const here = int(least) >= 0;
  bool const first = here && (r == m.rank || least < unsigned(x.first_experts));
  if (x.part != Part::whole && first != (x.part == Part::first)) return;
  char* const to = static_cast<char*>(x.rows) + p * x.row_bytes;
  int const units = int(x.row_bytes / 16);
  if (here && !failed) {
    PeerControl const* const own = PeerView(layout, m, m.rank).control();
    copy_row(to, PeerView(layout, m, r).rows(last_place(own)) + t * x.row_bytes, units);
  } else {
    fill_row(to, units, failed ? ~0u : 0u);
  }
}

// A warp for a row at a time.
__global__ void __launch_bounds__(kPullThreads) pull_kernel(Pull x, PeerLayout layout) {
  bool const failed = PeerView(layout, x.memory, x.memory.rank).control()->failure != 0;
  int const rows = int(x.memory.ranks * x.memory.tokens);  // check() says that an int holds it
  for (int i = int(blockIdx.x * kPullWarps + threadIdx.x / 32); i < rows;
       i += int(gridDim.x) * kPullWarps) {
    pull_row(x, layout, failed, i);
  }
}

void require_units(int64_t bytes, char const* name) {
  require(bytes % 16 == 0, name, ": expected a multiple of 16 on CUDA, got ", bytes);
}

}  // namespace

void publish(Publish const& x, Queue queue) {
  check(x);
  require_units(x.row_bytes, "row_bytes");
  require_units(x.row_stride, "row_stride");
  require(x.ids == nullptr || x.score_bytes == 4, "score_bytes: expected 4 on CUDA, got ",
          x.score_bytes);
  int64_t const blocks = x.tokens > 0 ? ceil_div(x.tokens, kWarps) : 1;
  publish_kernel<<<unsigned(blocks), kThreads, 0, queue.stream>>>(x, layout_of(x.memory));
  cuda_check(cudaGetLastError(), "launch of publish");
}

void tables(Tables const& x, Queue queue) {
  check(x);
  require(x.score_bytes == 4, "score_bytes: expected 4 on CUDA, got ", x.score_bytes);
  int64_t const slots = x.memory.tokens * x.top_k;
  dim3 const blocks(unsigned(slots > 0 ? ceil_div(slots, kThreads) : 1), unsigned(x.memory.ranks));
  tables_kernel<<<blocks, kThreads, 0, queue.stream>>>(x, layout_of(x.memory));
  cuda_check(cudaGetLastError(), "launch of tables");
}

void pull(Pull const& x, Queue queue) {
  check(x);
  require_units(x.row_bytes, "row_bytes");
  int64_t const rows = x.memory.ranks * x.memory.tokens;
  if (rows == 0) return;
  int64_t const blocks = std::min<int64_t>(ceil_div(rows, kPullWarps), multiprocessors(queue));
  pull_kernel<<<unsigned(blocks), kPullThreads, 0, queue.stream>>>(x, layout_of(x.memory));
  cuda_check(cudaGetLastError(), "launch of pull");
}

}  // namespace guild::cuda
