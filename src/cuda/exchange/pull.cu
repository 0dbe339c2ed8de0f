// Gets rows from the ranks that hold them: publish, pull.
//
// A warp copies a row, 16 bytes per lane, with several loads in flight. NVLink needs only a
// fraction of the bytes that all warps of the GPU would have in flight (bandwidth times latency),
// so a few SMs suffice while products run, and a block of pull() takes a whole one. Rows of
// different ranks alternate, so that links and local memory are busy at once. Plain loads from
// peers are safe: L1 is empty when a block begins, and nothing reads these rows before the barrier
// has ended, even if a block starts early.
#include <algorithm>

#include "checks/exchange.h"
#include "cuda/alignment.h"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/device.h"
#include "cuda/exchange/copies.h"
#include "cuda/exchange/pool.cuh"
#include "cuda/launch.h"
#include "cuda/require_runnable.h"
#include "shared/peer_memory.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPullThreads = 1024, kPullWarps = kPullThreads / 32;  // at most
constexpr int kPieceUnits = 128;  // of 16 bytes: of a row, what a warp loads at once

// kAtOnce: 16-byte words that a lane loads before it stores them.
template <int kAtOnce>
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
  wait_for_previous();
  let_next_start();
  int64_t const place = next_place(own.control());
  int64_t const t = blockIdx.x * int64_t(kWarps) + threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (t == 0 && lane == 0) own.control()->tokens[place] = x.tokens;
  if (t >= x.tokens) return;
  copy_row<8>(own.rows(place) + t * x.row_bytes,
              static_cast<char const*>(x.rows) + t * x.row_stride, int(x.row_bytes / 16));
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

// The smallest of the token's experts that this lane sees; -1 as unsigned: none here.
__device__ unsigned least_expert(Pull const& x, int64_t place) {
  unsigned least = ~0u;
  for (int k = threadIdx.x % 32; k < x.top_k; k += 32) {
    least = min(least, unsigned(x.ids[place * x.top_k + k]));
  }
  return least;
}

// A warp for a row at a time, or for a part of one.
__global__ void __launch_bounds__(kPullThreads) pull_kernel(Pull x, PeerLayout layout,
                                                            TokenShares shares) {
  PeerMemory const& m = x.memory;
  PeerControl const* const own = PeerView(layout, m, m.rank).control();
  wait_for_previous();
  let_next_start();
  bool const failed = own->failure != 0, others = x.part == Part::rest;
  int64_t const from_place = layout.rows + last_place(own) * layout.rows_bytes;
  int const count = PoolToken::count(m, others) * shares.parts;
  int const step = int(gridDim.x * blockDim.x) / 32, units = int(x.row_bytes / 16);
  int i = shares.first(int(blockIdx.x), int(threadIdx.x) / 32);
  if (i >= count) return;
  auto const token_of = [&](int share) { return PoolToken(m, share / shares.parts, others); };
  unsigned lane_least = least_expert(x, token_of(i).place(m));
  for (; i < count; i += step) {
    PoolToken const at = token_of(i);
    unsigned const least = __reduce_min_sync(~0u, lane_least);
    lane_least = least_expert(x, token_of(min(i + step, count - 1)).place(m));
    bool const first = at.source == int(m.rank) || least < unsigned(x.first_experts);
    if (x.part != Part::whole && first != (x.part == Part::first)) continue;
    int const begin = i % shares.parts * shares.per * kPieceUnits;
    int const part = min(units - begin, shares.per * kPieceUnits);
    char* const to = static_cast<char*>(x.rows) + at.place(m) * x.row_bytes + begin * 16;
    if (int(least) >= 0 && !failed) {
      char const* const from = static_cast<char const*>(m.peers[at.source]) + from_place;
      copy_row<4>(to, from + at.token * x.row_bytes + begin * 16, part);
    } else {
      fill_row(to, part, failed ? ~0u : 0u);
    }
  }
}

void require_units(int64_t bytes, char const* name) {
  require(bytes % 16 == 0, name, ": expected a multiple of 16 on CUDA, got ", bytes);
}

}  // namespace

void require_runnable(Publish const& x) {
  check(x);
  require_units(x.row_bytes, "row_bytes");
  require_units(x.row_stride, "row_stride");
  require_aligned(x.rows, 0, "rows");
  require(x.ids == nullptr || x.score_bytes == 4, "score_bytes: expected 4 on CUDA, got ",
          x.score_bytes);
}

void publish(Publish const& x, Queue queue) {
  require_runnable(x);
  int64_t const blocks = x.tokens > 0 ? ceil_div(x.tokens, kWarps) : 1;
  cuda_check(
      launch_kernel(
          publish_kernel,
          {.blocks = unsigned(blocks), .threads = kThreads, .stream = queue.stream, .early = true},
          x, layout_of(x.memory)),
      "launch of publish");
}

void require_runnable(Pull const& x) {
  check(x);
  require_units(x.row_bytes, "row_bytes");
  require_aligned(x.rows, 0, "rows");
  require_countable(x.memory);
}

void pull(Pull const& x, Queue queue) { pull(x, queue, nullptr); }

void pull(Pull const& x, Queue const& queue, cudaEvent_t begun) {
  require_runnable(x);
  int64_t const rows = x.memory.ranks * x.memory.tokens;
  if (rows == 0) return;
  int const pieces = int(ceil_div(x.row_bytes, kPieceUnits * 16));
  bool const early = begun == nullptr && few_blocks_suffice(rows * pieces, kPullWarps, queue);
  TokenShares const shares = TokenShares::of(rows, pieces, kPullWarps, most_blocks(early, queue));
  cuda_check(launch_kernel(pull_kernel,
                           {.blocks = unsigned(shares.blocks),
                            .threads = 32 * shares.warps,
                            .stream = queue.stream,
                            .early = early,
                            .begun = begun},
                           x, layout_of(x.memory), shares),
             "launch of pull");
}

}  // namespace guild::cuda
