// Sums over a token's rows here to the rank whose token it is: push() by token.
//
//   out[t] = sum over k of score[p, k] * y[row_of[p, k]], in the order of k, fp32
//
// A warp takes a token. Its lanes copy 16 bytes of four rows at a time to shared memory, a few
// steps ahead of the additions, and each adds what it copied: a multiprocessor has more bytes on
// their way than registers could hold, so that a few of them, beside products, keep a link busy.
#include <algorithm>

#include "cuda/alignment.h"
#include "cuda/element.cuh"
#include "cuda/exchange/pool.cuh"
#include "cuda/exchange/push_sums.h"
#include "cuda/shared_memory.h"
#include "cuda/sm90/arch/barrier.cuh"
#include "cuda/sm90/arch/copy.cuh"
#include "shared/peer_memory.h"
#include "shared/routing.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kAtOnce = 4;  // rows of a step
constexpr int kSteps = 3;   // whose bytes are on their way or being added
constexpr int kBytes = kWarps * kSteps * kAtOnce * 32 * 16;

__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` of the thread's last groups of copies are on their way.
template <int pending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// A token and lane l's of its slots, number l from `first` on.
struct TokenSlots {
  PoolToken at;
  SlotSpan slots;
  int row = -1;
  float score = 1;

  __device__ TokenSlots(Push const& x, int i)
      : at(x.memory, i, /*others=*/false),
        slots(slots_of(x.token_offsets, x.rows, x.top_k, at.place(x.memory))) {
    look_up(x, 0);
  }
  __device__ void look_up(Push const& x, int64_t first) {
    int64_t const slot = slots.begin + first + threadIdx.x % 32;
    bool const there = slot < slots.end;
    row = there ? x.row_of[slot] : -1;
    if (unsigned(row) >= unsigned(x.rows)) row = -1;
    if (x.scores != nullptr) score = there ? static_cast<float const*>(x.scores)[slot] : 0.f;
  }
};

// This lane's part of the step buffers.
struct Staging {
  uint4* own;

  __device__ uint4* at(int step, int k) const { return own + (step * kAtOnce + k) * 32; }
};

// Up to 32 slots: all of a step's rows are known to the warp.
template <class T>
__device__ void push_few(T* out, T const* y, int64_t stride, int units, TokenSlots const& token,
                         unsigned there, Staging const& staging) {
  int const lane = threadIdx.x % 32, count = __popc(there);
  int const from = lane < count ? int(__fns(there, 0, lane + 1)) : 0;
  int const row = __shfl_sync(~0u, token.row, from);
  float const score = __shfl_sync(~0u, token.score, from);
  int const batches = ceil_div(count, kAtOnce), steps = ceil_div(units, 32) * batches;
  int unit = lane, first = 0, next = 0;  // of the next step to be copied
  auto const copy = [&] {
    if (next < steps) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        int const which = first + k;
        int64_t const r = __shfl_sync(~0u, row, which % 32);
        bool const valid = which < count && unit < units;
        T const* const at = y + (valid ? r * stride + unit * 8 : 0);
        copy_async(shared_address(staging.at(next % kSteps, k)), at, valid);
      }
      ++next;
      first += kAtOnce;
      if (first >= count) first = 0, unit += 32;
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kSteps - 1; ++i) copy();
  Eight sum{};
  int begin = 0, column = lane;  // of the step to be added
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kSteps - 2>();
    copy();
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      float const factor = __shfl_sync(~0u, score, (begin + k) % 32);
      if (begin + k >= count) continue;
      Eight const e = unpack_eight<T>(*staging.at(step % kSteps, k));
#pragma unroll
      for (int j = 0; j < 8; ++j) sum.value[j] += factor * e.value[j];
    }
    begin += kAtOnce;
    if (begin < count) continue;
    if (column < units) store_eight(out + column * 8, sum);
    sum = {};
    begin = 0;
    column += 32;
  }
}

// Any number of slots, 32 after the other for each column.
template <class T>
__device__ void push_many(Push const& x, T* out, T const* y, int64_t stride, int units,
                          TokenSlots& token) {
  int const lane = threadIdx.x % 32;
  for (int base = 0; base < units; base += 32) {
    int const unit = base + lane;
    Eight sum{};
    bool any = false;
    for (int64_t first = 0; token.slots.begin + first < token.slots.end; first += 32) {
      token.look_up(x, first);
      unsigned there = __ballot_sync(~0u, token.row >= 0);
      any |= there != 0;
      for (; there != 0; there &= there - 1) {
        int const from = __ffs(int(there)) - 1;
        int64_t const row = __shfl_sync(~0u, token.row, from);
        float const factor = __shfl_sync(~0u, token.score, from);
        if (unit >= units) continue;
        Eight const e = load_eight(y + row * stride + unit * 8);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum.value[j] += factor * e.value[j];
      }
    }
    if (any && unit < units) store_eight(out + unit * 8, sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) push_kernel(Push x, PeerLayout layout, int64_t stride) {
  extern __shared__ uint4 staged[];
  PeerMemory const& m = x.memory;
  if (PeerView(layout, m, m.rank).control()->failure != 0) return;
  int const warp = int(threadIdx.x) / 32, units = int(x.hidden / 8);
  Staging const staging{staged + warp * kSteps * kAtOnce * 32 + threadIdx.x % 32};
  int const tokens = PoolToken::count(m, /*others=*/false);
  int i = int(blockIdx.x) * kWarps + warp, step = int(gridDim.x) * kWarps;
  if (i >= tokens) return;
  T const* const y = static_cast<T const*>(x.y.data);
  for (TokenSlots token(x, i); i < tokens; i += step) {
    TokenSlots next(x, min(i + step, tokens - 1));  // on its way while this one is added
    bool const few = token.slots.end - token.slots.begin <= 32;
    unsigned const there = __ballot_sync(~0u, token.row >= 0);
    if (there != 0 || !few) {
      int64_t const to = m.rank * x.tokens[token.at.source] + token.at.token;
      T* const out =
          reinterpret_cast<T*>(PeerView(layout, m, token.at.source).returned()) + to * x.hidden;
      if (few) {
        push_few(out, y, stride, units, token, there, staging);
      } else {
        push_many(x, out, y, stride, units, token);
      }
    }
    token = next;
  }
}

}  // namespace

void push_sums(Push const& x, Queue const& queue) {
  int64_t const tokens = x.memory.ranks * x.memory.tokens, stride = row_stride(x.y, x.hidden);
  int64_t const blocks = std::min<int64_t>(ceil_div(tokens, kWarps), multiprocessors(queue));
  with_type(x.dtype, [&](auto element) {
    auto const kernel = push_kernel<decltype(element)>;
    static AllowedOn allowed;
    allow_shared_memory(kernel, kBytes, allowed, "shared memory of push");
    kernel<<<unsigned(blocks), kThreads, kBytes, queue.stream>>>(x, layout_of(x.memory), stride);
  });
  cuda_check(cudaGetLastError(), "launch of push");
}

}  // namespace guild::cuda
