// Host side of the products for few tokens: launches.
#pragma once
#include <algorithm>

#include "cuda/device.h"
#include "cuda/shared_memory.h"
#include "cuda/sm90/decode/product.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda::sm90 {

// Weights (E, n, k) in boxes of 64 of k and `rows` of n, 64 where n is contiguous.
template <class T, Major major>
CUtensorMap block_map(ConstWeight const& w, int64_t experts, int64_t n, int64_t k, int rows,
                      char const* name) {
  int64_t const z = places(w, experts);
  MapShape const shape = major == Major::K
                             ? MapShape{k, n, z, w.out_stride, w.expert_stride, 64, rows, 1}
                             : MapShape{n, k, z, w.in_stride, w.expert_stride, 64, 64, 1};
  return streamed_map(w.data, dtype_of<T>(), shape, name);
}

// Launches as many blocks as `tiles`, an upper bound, can occupy at the same time. allowed: of this
// kernel, shared_memory.h.
template <class Params>
void launch_few(void (*kernel)(Params), AllowedOn& allowed, int bytes, Params const& params,
                int64_t tiles, Queue const& queue) {
  allow_shared_memory(kernel, bytes, allowed, "shared memory of a product for few tokens");
  // On a part of the multiprocessors one block each: two would spread over twice as many.
  int const at_once = queue.sms > 0 ? 1 : kAtOnce;
  unsigned const blocks = unsigned(std::min<int64_t>(tiles, at_once * multiprocessors(queue)));
  cuda_check(launch_early(kernel, dim3(blocks), kPlanThreads, bytes, queue.stream, params),
             "launch of a product for few tokens");
}

template <class Product>
void launch_decode(typename Product::Params const& params, int64_t tiles, Queue const& queue) {
  static AllowedOn allowed;
  launch_few(decode_kernel<Product>, allowed, int(sizeof(typename Product::SharedStorage)), params,
             tiles, queue);
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
