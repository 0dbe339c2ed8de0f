// A warp's place in its block; sums and scans over its 32 lanes.
#pragma once

namespace guild::cuda {

// Which warp of the block this is, known to the compiler as the same for all lanes.
__device__ inline int warp_index() { return __shfl_sync(~0u, int(threadIdx.x / 32), 0); }

// Sum over the warp, the same in every lane and in every run.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Inclusive scan: the values of lanes 0 .. this one, combined.
template <class F>
__device__ inline int warp_scan(int value, F&& combine) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int const other = __shfl_up_sync(~0u, value, step);
    if (int(threadIdx.x % 32) >= step) value = combine(value, other);
  }
  return value;
}

// Inclusive sums over the warp's lanes.
__device__ inline int warp_scan(int value) {
  return warp_scan(value, [](int x, int y) { return x + y; });
}

}  // namespace guild::cuda
