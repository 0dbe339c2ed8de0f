// The numbers of a block's tiles: every n-th, or claimed from a counter.
#pragma once
#include "cuda/sm90/decode/claims.h"

namespace guild::cuda::sm90 {

// Dynamic scheduling: how many tiles a launch's blocks have claimed besides each one's first. 0
// before a launch and after it: the block that gets the last number resets it.
[[maybe_unused]] static __device__ int32_t claimed[kClaimCounters];

// The first tile's number, and then claimed ones or every n-th. Called by a whole warp.
struct TileNumbers {
  int const claims;  // which of `claimed` is this launch's; -1: every block takes every n-th tile
  int now = blockIdx.x, after = 0;

  __device__ explicit TileNumbers(int claims) : claims(claims) {}

  // Starts to fetch the next number.
  __device__ void ask() {
    after = now + int(gridDim.x);
    if (claims < 0) return;
    if (threadIdx.x % 32 == 0) after = int(gridDim.x) + atomicAdd(&claimed[claims], 1);
  }
  __device__ void answer() { now = __shfl_sync(~0u, after, 0); }

  // Called when there is no tile of this number. As many blocks find that as have had a first tile,
  // so that there are as many claims as tiles.
  __device__ void fail(int tiles) const {
    if (claims >= 0 && now == int(gridDim.x) + tiles - 1) claimed[claims] = 0;
  }
};

}  // namespace guild::cuda::sm90
