// The order in which warps take the tokens of all ranks.
#pragma once
#include <algorithm>

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

// How a kernel's warps share tokens. Where there are fewer tokens than warps, several warps take a
// part of a token each, and they are spread over the multiprocessors.
struct Shares {
  int parts = 1;        // of a token
  int per = 0;          // of the `pieces` of a token: those of a part, the last one may have fewer
  bool spread = false;  // whether neighbouring shares belong to different blocks
  int blocks = 1;

  static Shares of(int64_t tokens, int pieces, int warps, int multiprocessors) {
    int64_t const all = int64_t(warps) * multiprocessors;
    int const most = int(std::clamp<int64_t>(tokens > 0 ? all / tokens : 1, 1, pieces));
    Shares s;
    s.per = int(ceil_div(pieces, most)), s.parts = int(ceil_div(pieces, s.per));
    int64_t const shares = tokens * s.parts;
    s.spread = shares < all;
    s.blocks = int(std::min<int64_t>(s.spread ? shares : ceil_div(shares, warps), multiprocessors));
    return s;
  }
  // The first share of a warp of this block; the next one is gridDim.x * warps further.
  __device__ int first(int warps) const {
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
