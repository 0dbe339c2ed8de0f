// The order in which warps process the tokens of all ranks.
#pragma once
#include <algorithm>

#include "cuda/device.h"
#include "guild/error.h"
#include "guild/exchange.h"
#include "shared/token_shares.h"

namespace guild::cuda {

// Token i in that order; `others`: among other ranks' tokens only. Tokens of the same number, one
// from each rank, are consecutive, so that links and local memory are busy at once. The rank that
// comes first varies with the number; otherwise a warp that takes every n-th token might get tokens
// of one rank only.
struct PoolToken {
  int token, source;

  __device__ PoolToken(PeerMemory const& m, int i, bool others) {
    int const ranks = int(m.ranks), of_each = others ? ranks - 1 : ranks;
    token = i / of_each;
    unsigned const any = unsigned(token) * 0x9e3779b1u >> 16;
    source = (int(m.rank) + 1 + int((unsigned(i) + any) % unsigned(of_each))) % ranks;
  }
  __device__ static int count(PeerMemory const& m, bool others) {
    return int((m.ranks - (others ? 1 : 0)) * m.tokens);  // check() ensures that it fits
  }
  __device__ int64_t place(PeerMemory const& m) const { return source * m.tokens + token; }
};

// The most blocks of a kernel that follows a barrier and starts early. They hold SMs while the
// barrier waits for other ranks, which may in turn be waiting for other kernels of this rank, such
// as NCCL's. Half of the SMs stay free for these.
inline int most_waiting_blocks(Queue const& queue) {
  return std::max(multiprocessors(queue) / 2, 1);
}
// Whether they have a warp for each of the pieces into which rows are divided.
inline bool few_blocks_suffice(int64_t pieces, int warps, Queue const& queue) {
  return pieces <= int64_t(warps) * most_waiting_blocks(queue);
}
// early: whether the kernel may start early.
inline int most_blocks(bool early, Queue const& queue) {
  return early ? most_waiting_blocks(queue) : multiprocessors(queue);
}

// Warps count tokens in 32 bits, and take a step beyond the last one.
inline void require_countable(PeerMemory const& m) {
  constexpr int64_t most = (int64_t(1) << 31) - (1 << 16);
  require(m.ranks * m.tokens <= most, "memory: expected at most ", most,
          " tokens of all ranks on CUDA, got ", m.ranks, " * ", m.tokens);
}

}  // namespace guild::cuda
