// Host side of the products for few tokens: launches.
#pragma once
#include <algorithm>

#include "cuda/device.h"
#include "cuda/sm90/decode/product.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda::sm90 {

// tiles: an upper bound.
template <class Product>
void launch_decode(typename Product::Params const& params, int64_t tiles, Queue const& queue) {
  constexpr int bytes = sizeof(typename Product::SharedStorage);
  cuda_check(cudaFuncSetAttribute(decode_kernel<Product>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory of a product for few tokens");
  // On a part of the multiprocessors one block each: two would spread over twice as many.
  int const at_once = queue.sms > 0 ? 1 : kAtOnce;
  unsigned const blocks = unsigned(std::min<int64_t>(tiles, at_once * multiprocessors(queue)));
  cuda_check(launch_early(decode_kernel<Product>, dim3(blocks), Product::kThreads, bytes,
                          queue.stream, params),
             "launch of a product for few tokens");
}

// An upper bound on the number of tiles, over experts of unknown sizes.
inline int64_t most_decode_tiles(int64_t rows, int64_t groups, int64_t across, int tokens) {
  return (rows / tokens + std::min(rows, groups)) * across;
}

// Calls f.template operator()<most rows of a tile>(): no expert has more than `rows`.
template <class F>
void with_tokens(int64_t rows, F&& f) {
  if (rows <= 8) {
    f.template operator()<8>();
  } else if (rows <= 16) {
    f.template operator()<16>();
  } else if (rows <= 32) {
    f.template operator()<32>();
  } else {
    f.template operator()<64>();
  }
}

}  // namespace guild::cuda::sm90
