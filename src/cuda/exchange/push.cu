// Results to the ranks whose tokens they are, straight into their memory: sums over a token's rows
// here, rows by themselves, and gradients of scores.
//
// A block takes a token, a thread eight of its columns, as in rows/combine.cu. Tokens of different
// ranks alternate, so that links and own memory are busy at once. Stores to a peer are not waited
// for; that they have arrived is what the barrier's release says.
#include "check_exchange.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "shared/peer_memory.h"
#include "shared/routing.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 8;  // rows that a thread loads before it adds them

// A token of the pool, in the order in which blocks take them.
struct PoolToken {
  int64_t token, source, place;

  __device__ PoolToken(PeerMemory const& m, int64_t i)
      : token(i / m.ranks), source((i + m.rank + 1) % m.ranks), place(source * m.tokens + token) {}
};

__device__ bool failed(PeerLayout const& layout, PeerMemory const& m) {
  return PeerView(layout, m, m.rank).control()->failure != 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads) push_kernel(Push x, PeerLayout layout, int64_t stride) {
  PeerMemory const& m = x.memory;
  PoolToken const at(m, blockIdx.x);
  if (failed(layout, m)) return;
  auto const [begin, end] = slots_of(x.token_offsets, x.rows, x.top_k, at.place);
  int32_t const* const row_of = x.row_of + begin;
  float const* const scores =
      x.scores == nullptr ? nullptr : static_cast<float const*>(x.scores) + begin;
  int const count = int(end - begin), rows = int(x.rows);
  T const* const y = static_cast<T const*>(x.y.data);
  bool any = false;
  for (int k = 0; k < count; ++k) any |= unsigned(row_of[k]) < unsigned(rows);
  if (!any) return;
  int64_t const to = m.rank * x.tokens[at.source] + at.token;
  T* const out = reinterpret_cast<T*>(PeerView(layout, m, at.source).returned()) + to * x.hidden;
  for (int col = threadIdx.x * 8; col < x.hidden; col += kThreads * 8) {
    Eight sum{};
#pragma unroll 1
    for (int k = 0; k < count; k += kAtOnce) {
      int row[kAtOnce];
      float score[kAtOnce];
      uint4 words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        row[i] = k + i < count ? row_of[k + i] : -1;
        score[i] = k + i < count && scores != nullptr ? scores[k + i] : 1.f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (unsigned(row[i]) < unsigned(rows)) words[i] = load_words(y + row[i] * stride + col);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (unsigned(row[i]) >= unsigned(rows)) continue;
        Eight const e = unpack_eight<T>(words[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum.value[j] += score[i] * e.value[j];
      }
    }
    store_eight(out + col, sum);
  }
}

// Each slot's row by itself.
template <class T>
__global__ void __launch_bounds__(kThreads) push_slots_kernel(Push x, PeerLayout layout,
                                                              int64_t stride) {
  PeerMemory const& m = x.memory;
  PoolToken const at(m, blockIdx.x);
  if (failed(layout, m)) return;
  T* const out = reinterpret_cast<T*>(PeerView(layout, m, at.source).returned()) +
                 at.token * x.top_k * x.hidden;
  T const* const y = static_cast<T const*>(x.y.data);
  for (int k = 0; k < x.top_k; ++k) {
    int const row = x.row_of[at.place * x.top_k + k];
    if (unsigned(row) >= unsigned(x.rows)) continue;
    for (int col = threadIdx.x * 8; col < x.hidden; col += kThreads * 8) {
      *reinterpret_cast<uint4*>(out + k * x.hidden + col) = load_words(y + row * stride + col);
    }
  }
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

}  // namespace

void push(Push const& x, Queue queue) {
  check(x);
  require_16_bit(x.dtype);
  require_whole_16_bytes(x.hidden, "hidden");
  require_aligned(x.y, "y");
  int64_t const blocks = x.memory.ranks * x.memory.tokens, stride = row_stride(x.y, x.hidden);
  if (blocks == 0) return;
  PeerLayout const layout = layout_of(x.memory);
  with_type(x.dtype, [&](auto element) {
    auto const kernel =
        x.by_slot ? push_slots_kernel<decltype(element)> : push_kernel<decltype(element)>;
    kernel<<<unsigned(blocks), kThreads, 0, queue.stream>>>(x, layout, stride);
  });
  cuda_check(cudaGetLastError(), "launch of push");
}

void push_scores(PushScores const& x, Queue queue) {
  check(x);
  require(x.score_bytes == 4, "score_bytes: expected 4 on CUDA, got ", x.score_bytes);
  int64_t const slots = x.memory.tokens * x.top_k;
  if (slots == 0) return;
  dim3 const blocks(unsigned(ceil_div(slots, kThreads)), unsigned(x.memory.ranks));
  push_scores_kernel<<<blocks, kThreads, 0, queue.stream>>>(x, layout_of(x.memory));
  cuda_check(cudaGetLastError(), "launch of push_scores");
}

}  // namespace guild::cuda
