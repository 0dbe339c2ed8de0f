// Pushes results into the memory of the ranks that own the tokens: sums over a token's rows on this
// rank (push_sums.cu), single rows, and gradients of scores. Also adds up what arrived from all
// ranks.
//
// Tokens of different ranks alternate, so that links and local memory are busy at once. Nobody
// waits for stores to a peer: the barrier's release guarantees that they have arrived.
#include <algorithm>

#include "checks/exchange.h"
#include "cuda/alignment.h"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "cuda/exchange/copies.h"
#include "cuda/exchange/pool.cuh"
#include "cuda/launch.h"
#include "cuda/require_runnable.h"
#include "shared/peer_memory.h"
#include "shared/routing.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // rows that a thread loads before it adds them

__device__ bool failed(PeerLayout const& layout, PeerMemory const& m) {
  return PeerView(layout, m, m.rank).control()->failure != 0;
}

// Each slot's row by itself.
template <class T>
__global__ void __launch_bounds__(kThreads) push_slots_kernel(Push x, PeerLayout layout,
                                                              int64_t stride) {
  PeerMemory const& m = x.memory;
  PoolToken const at(m, int(blockIdx.x), /*others=*/false);
  if (failed(layout, m)) return;
  T* const out = reinterpret_cast<T*>(PeerView(layout, m, at.source).returned()) +
                 at.token * x.top_k * x.hidden;
  T const* const y = static_cast<T const*>(x.y.data);
  for (int k = 0; k < x.top_k; ++k) {
    int const row = x.row_of[at.place(m) * x.top_k + k];
    if (unsigned(row) >= unsigned(x.rows)) continue;
    for (int col = threadIdx.x * 8; col < x.hidden; col += kThreads * 8) {
      *reinterpret_cast<uint4*>(out + k * x.hidden + col) = load_words(y + row * stride + col);
    }
  }
}

// A thread for eight columns of a token.
template <class T>
__global__ void __launch_bounds__(kThreads) collect_kernel(Collect x, PeerLayout layout,
                                                           int64_t residual_stride) {
  PeerMemory const& m = x.memory;
  int64_t const i = blockIdx.x * int64_t(kThreads) + threadIdx.x, units = x.hidden / 8;
  int64_t const token = i / units, col = i % units * 8;
  T const* const returned = reinterpret_cast<T const*>(PeerView(layout, m, m.rank).returned());
  wait_for_previous();
  let_next_start();
  if (token >= x.tokens) return;
  int32_t const* const row_of = x.token_row + token * m.ranks;
  Eight sum{};
  if (x.residual.data != nullptr) {
    sum = load_eight(static_cast<T const*>(x.residual.data) + token * residual_stride + col);
  }
  for (int r = 0; r < m.ranks; r += kAtOnce) {
    uint4 words[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      int const row = r + k < m.ranks ? row_of[r + k] : -1;
      there[k] = row >= 0;
      // Past the first-level cache, which may hold older data where the kernel starts early.
      if (there[k])
        words[k] = __ldcg(reinterpret_cast<uint4 const*>(returned + row * x.hidden + col));
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!there[k]) continue;
      Eight const e = unpack_eight<T>(words[k]);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum.value[j] += e.value[j];
    }
  }
  store_eight(static_cast<T*>(x.o) + token * x.hidden + col, sum);
}

// A thread for each slot; blockIdx.y is the rank.
__global__ void __launch_bounds__(kThreads) push_scores_kernel(PushScores x, PeerLayout layout) {
  PeerMemory const& m = x.memory;
  int64_t const i = blockIdx.x * int64_t(kThreads) + threadIdx.x, slots = m.tokens * x.top_k;
  int64_t const at = blockIdx.y * slots + i;
  if (i >= slots || x.ids[at] < 0 || failed(layout, m)) return;
  float* const to = reinterpret_cast<float*>(PeerView(layout, m, blockIdx.y).returned_scores());
  to[i] = static_cast<float const*>(x.scores)[at];
}

// With x.scores, copies what came back there; without, clears the memory that others push to.
__global__ void __launch_bounds__(kThreads) own_scores_kernel(ReturnedScores x, PeerLayout layout) {
  int64_t const i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i >= x.slots) return;
  PeerView const own(layout, x.memory, x.memory.rank);
  float* const returned = reinterpret_cast<float*>(own.returned_scores());
  if (x.scores == nullptr) {
    returned[i] = 0;
  } else {
    static_cast<float*>(x.scores)[i] = returned[i];
  }
}

void run_own_scores(ReturnedScores const& x, Queue const& queue) {
  require_runnable(x);
  int64_t const blocks = std::max<int64_t>(ceil_div(x.slots, kThreads), 1);  // as collect()
  own_scores_kernel<<<unsigned(blocks), kThreads, 0, queue.stream>>>(x, layout_of(x.memory));
  cuda_check(cudaGetLastError(), "launch of a copy of scores");
}

}  // namespace

void require_runnable(Push const& x) {
  check(x);
  require_16_bit(x.dtype);
  require_whole_16_bytes(x.hidden, "hidden");
  require_aligned(x.y, "y");
  require_countable(x.memory);
}

void push(Push const& x, Queue queue) { push(x, queue, nullptr); }

void push(Push const& x, Queue const& queue, cudaEvent_t begun) {
  require_runnable(x);
  int64_t const tokens = x.memory.ranks * x.memory.tokens, stride = row_stride(x.y, x.hidden);
  if (tokens == 0) return;
  PeerLayout const layout = layout_of(x.memory);
  if (!x.by_slot) return push_sums(x, queue, begun);
  with_type(x.dtype, [&](auto element) {
    push_slots_kernel<decltype(element)>
        <<<unsigned(tokens), kThreads, 0, queue.stream>>>(x, layout, stride);
  });
  cuda_check(cudaGetLastError(), "launch of push");
}

void require_runnable(Collect const& x) {
  check(x);
  require_16_bit(x.dtype);
  require_whole_16_bytes(x.hidden, "hidden");
  require_aligned(x.residual, "residual");
  require_aligned(x.o, 0, "o");
}

void collect(Collect const& x, Queue queue) {
  require_runnable(x);
  // One at least: what comes next may start early, but not while the barrier before still waits.
  int64_t const blocks = std::max<int64_t>(ceil_div(x.tokens * (x.hidden / 8), kThreads), 1);
  PeerLayout const layout = layout_of(x.memory);
  int64_t const stride = row_stride(x.residual, x.hidden);
  Launch const launch{.blocks = unsigned(blocks),
                      .threads = kThreads,
                      .stream = queue.stream,
                      .early = blocks <= most_waiting_blocks(queue)};
  with_type(x.dtype, [&](auto element) {
    cuda_check(launch_kernel(collect_kernel<decltype(element)>, launch, x, layout, stride),
               "launch of collect");
  });
}

void require_runnable(PushScores const& x) {
  check(x);
  require(x.score_bytes == 4, "score_bytes: expected 4 on CUDA, got ", x.score_bytes);
}

void push_scores(PushScores const& x, Queue queue) {
  require_runnable(x);
  int64_t const slots = x.memory.tokens * x.top_k;
  if (slots == 0) return;
  dim3 const blocks(unsigned(ceil_div(slots, kThreads)), unsigned(x.memory.ranks));
  push_scores_kernel<<<blocks, kThreads, 0, queue.stream>>>(x, layout_of(x.memory));
  cuda_check(cudaGetLastError(), "launch of push_scores");
}

void require_runnable(ReturnedScores const& x) {
  check(x);
  require(x.score_bytes == 4, "score_bytes: expected 4 on CUDA, got ", x.score_bytes);
}

void clear_scores(ReturnedScores const& x, Queue queue) {
  ReturnedScores cleared = x;
  cleared.scores = nullptr;
  run_own_scores(cleared, queue);
}

void collect_scores(ReturnedScores const& x, Queue queue) {
  check_collected(x);
  run_own_scores(x, queue);
}

}  // namespace guild::cuda
