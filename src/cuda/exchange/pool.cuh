// The order in which warps take the tokens of all ranks.
#pragma once
#include <algorithm>

#include "cuda/device.h"
#include "guild/error.h"
#include "guild/exchange.h"
#include "shared/tiles.h"

namespace guild::cuda {

// Token i in that order; `others`: among other ranks' tokens only. All ranks' tokens of one number
// follow each other, so that links and own memory are busy at once. Which rank comes first varies
// with the number: otherwise a warp that takes every n-th token might get those of one rank only.
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

// The most blocks of a kernel that follows a barrier and starts early: they occupy multiprocessors
// while the barrier waits for other ranks. Those may be waiting for other kernels of this rank,
// such as NCCL's, and half of the multiprocessors stay free for these.
inline int most_waiting_blocks(Queue const& queue) {
  return std::max(multiprocessors(queue) / 2, 1);
}

// How a kernel's warps share tokens. Where there are fewer tokens than warps, several warps take a
// part of a token each, and they are spread over the multiprocessors.
struct Shares {
  int pieces = 1, parts = 1;  // of a token
  int per = 0;                // pieces of a part; the last one of a token may have fewer
  bool spread = false;        // whether neighbouring shares belong to different blocks
  int blocks = 1, warps = 1;  // warps: of a block

  // tokens: at least 1; most_warps: of a block.
  static Shares of(int64_t tokens, int pieces, int most_warps, int most_blocks) {
    Shares s{.pieces = pieces};
    int64_t const all = int64_t(most_warps) * most_blocks;
    s.per = int(ceil_div(pieces, std::clamp<int64_t>(all / tokens, 1, pieces)));
    s.parts = int(ceil_div(pieces, s.per));
    int64_t const shares = tokens * s.parts;
    s.spread = shares < all;
    s.blocks =
        int(std::min<int64_t>(s.spread ? shares : ceil_div(shares, most_warps), most_blocks));
    s.warps = int(std::min<int64_t>(ceil_div(shares, s.blocks), most_warps));
    return s;
  }
  // The first share of a warp of this block; the next one is as many further as there are warps.
  __device__ int first() const {
    int const warp = int(threadIdx.x) / 32, block = int(blockIdx.x);
    return spread ? warp * int(gridDim.x) + block : block * warps + warp;
  }
};

// Warps count tokens in 32 bits, and take a step beyond the last one.
inline void require_countable(PeerMemory const& m) {
  constexpr int64_t most = (int64_t(1) << 31) - (1 << 16);
  require(m.ranks * m.tokens <= most, "memory: expected at most ", most,
          " tokens of all ranks on CUDA, got ", m.ranks, " * ", m.tokens);
}

}  // namespace guild::cuda
