// How a kernel's tokens are divided among its warps. Host and device.
#pragma once
#include <algorithm>
#include <cstdint>

#include "shared/ceil_div.h"
#include "shared/host_device.h"

namespace guild {

// With fewer tokens than warps, several warps share a token, one part each, and the parts are
// spread over the SMs.
struct TokenShares {
  int pieces = 1, parts = 1;  // of a token
  int per = 0;                // pieces of a part; the last one of a token may have fewer
  bool spread = false;        // whether neighbouring shares belong to different blocks
  int blocks = 1, warps = 1;  // warps: of a block

  // tokens: at least 1; most_warps: of a block.
  static TokenShares of(int64_t tokens, int pieces, int most_warps, int most_blocks) {
    TokenShares s{.pieces = pieces};
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
  // The first share of a warp; its next one is as many further as there are warps in all blocks.
  GUILD_HD int first(int block, int warp) const {
    return spread ? warp * blocks + block : block * warps + warp;
  }
};

}  // namespace guild
