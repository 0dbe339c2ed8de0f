// The numbers of a block's tiles: every n-th (static) or claimed from a counter (dynamic).
#pragma once
#include "cuda/sm90/decode/claims.h"

namespace guild::cuda::sm90 {

// Dynamic scheduling: the number of tiles claimed by a launch's blocks, not counting each block's
// first. It is 0 before and after a launch: the block that gets the last number resets it.
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

  // Called when there is no tile with this number. Each block that had a first tile fails exactly
  // once, so there are as many claims as tiles, which identifies the last claim.
  __device__ void fail(int tiles) const {
    if (claims >= 0 && now == int(gridDim.x) + tiles - 1) claimed[claims] = 0;
  }
};

}  // namespace guild::cuda::sm90
