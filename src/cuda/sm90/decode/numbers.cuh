// The numbers of a block's tiles: every n-th, or claimed from a counter.
#pragma once
#include "cuda/sm90/decode/claims.h"

namespace guild::cuda::sm90 {

// Dynamic scheduling: how many tiles a launch's blocks have claimed beside each one's first. 0
// before a launch and after it: the block that gets the last number sees to that.
[[maybe_unused]] static __device__ int32_t claimed[kClaimCounters];

// Of the first tile, and claimed or every n-th from then on. A whole warp.
struct TileNumbers {
  int const claims;  // which of `claimed` is this launch's; -1: every block takes every n-th tile
  int now = blockIdx.x, after = 0;

  __device__ explicit TileNumbers(int claims) : claims(claims) {}

  // Starts to find out the number that follows.
  __device__ void ask() {
    after = now + int(gridDim.x);
    if (claims < 0) return;
    if (threadIdx.x % 32 == 0) after = int(gridDim.x) + atomicAdd(&claimed[claims], 1);
  }
  __device__ void answer() { now = __shfl_sync(~0u, after, 0); }

  // There is no such tile. As many blocks find that as have had a first tile, so that there are as
  // many claims as tiles.
  __device__ void fail(int tiles) const {
    if (claims >= 0 && now == int(gridDim.x) + tiles - 1) claimed[claims] = 0;
  }
};

}  // namespace guild::cuda::sm90
