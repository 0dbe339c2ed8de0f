// Host side of the products for few tokens: launches.
#pragma once
#include <algorithm>

#include "cuda/device.h"
#include "cuda/shared_memory.h"
#include "cuda/sm90/decode/product.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/stage_map.h"

namespace guild::cuda::sm90 {

// Weights (E, n, k), read once, in boxes of 64 of k and `rows` of n, 64 where n is contiguous.
template <class T, Major major>
CUtensorMap block_map(ConstWeight const& w, int64_t experts, int64_t n, int64_t k, int rows,
                      char const* name) {
  return streamed_map(w.data, dtype_of<T>(), weight_shape<major>(w, experts, n, k, rows), name);
}

// How far the second half of weights lies behind the first, in elements.
inline int64_t apart(ConstWeight const& first, ConstWeight const& second) {
  return (static_cast<char const*>(second.data) - static_cast<char const*>(first.data)) /
         kElementBytes;
}
// Whether a stage of weights that are contiguous along k is loaded by one instruction: where its
// rows and steps lie evenly.
inline bool comes_by_stage(ConstWeight const& first, ConstWeight const& second, int64_t k,
                           bool halves = true) {
  return k % 64 == 0 && (halves ? lie_evenly(first, second) : first.expert_at == nullptr);
}

// The weights of a product, gate and up if `halves`.
template <class Product, class T, Major major>
typename Product::Source weight_source(ConstWeight const& first, ConstWeight const& second,
                                       int64_t experts, int64_t n, int64_t k, bool halves,
                                       char const* name) {
  constexpr DecodeShape shape = Product::kShape;
  typename Product::Source to{};
  to.by_stage = major == Major::K && comes_by_stage(first, second, k, halves);
  if (to.by_stage) {
    int const parts = halves ? 2 : 1;
    to.stage = stage_map(first.data, dtype_of<T>(),
                         {.rows = n,
                          .parts = parts,
                          .steps = k / 64,
                          .experts = experts,
                          .row_stride = first.out_stride,
                          .part_stride = halves ? apart(first, second) : first.out_stride,
                          .expert_stride = first.expert_stride,
                          .box_rows = shape.rows / parts,
                          .box_steps = shape.steps()},
                         name);
    return to;
  }
  to.part[0] = block_map<T, major>(first, experts, n, k, Product::kBoxRows, name);
  to.part[1] = block_map<T, major>(second, experts, n, k, Product::kBoxRows, name);
  return to;
}

template <class Product>
__global__ void __launch_bounds__(Product::kThreads, Product::kBlocksAtOnce) decode_kernel(
    __grid_constant__ typename Product::Params const p) {
  Product::run(p);
}

// Launches as many blocks as are resident at a time, but no more than `tiles`, an upper bound on
// the number of tiles; of clusters all, since each has a single tile. allowed: the kernel's own
// (shared_memory.h). most: the most shared memory of any launch, in bytes.
template <class Params>
void launch_few(void (*kernel)(Params), AllowedOn& allowed, int most, int bytes,
                Params const& params, int64_t tiles, int blocks_at_once, Queue const& queue,
                int cluster = 1) {
  allow_shared_memory(kernel, most, allowed, "shared memory of a product for few tokens");
  // On a part of the multiprocessors one block each: two would spread over twice as many.
  int const at_once = queue.sms > 0 ? 1 : blocks_at_once;
  int64_t const places = cluster > 1 ? tiles : at_once * multiprocessors(queue);
  unsigned const blocks = unsigned(std::min(tiles, places));
  cuda_check(launch_kernel(kernel,
                           {.blocks = blocks,
                            .threads = kPlanThreads,
                            .bytes = bytes,
                            .stream = queue.stream,
                            .cluster = cluster,
                            .early = true},
                           params),
             "launch of a product for few tokens");
}

// blocks_at_once: on a multiprocessor, up to kAtOnce.
template <class Product>
void launch_decode(typename Product::Params& params, int64_t tiles, int blocks_at_once,
                   Queue const& queue) {
  static AllowedOn allowed;
  params.stages = stages_of_block(sizeof(typename Product::Stage), blocks_at_once);
  int const most = Product::bytes(stages_of_block(sizeof(typename Product::Stage), 1));
  launch_few(decode_kernel<Product>, allowed, most, Product::bytes(params.stages), params, tiles,
             blocks_at_once, queue);
}

// An upper bound on the number of tiles, over experts of unknown sizes.
template <class Params>
int64_t most_decode_tiles(Params const& p, int64_t groups, int tokens) {
  int64_t const rows = p.rows, shared = ceil_div(p.shared.rows, tokens) * p.shared.across;
  return (rows / tokens + std::min(rows, groups)) * p.across + shared;
}

// sort: null if there are offsets.
inline PlanFrom plan_from(Sort const* sort) {
  if (sort == nullptr) return PlanFrom::offsets;
  return sort->tokens * sort->top_k <= kMostSlotsInWarp ? PlanFrom::few_slots : PlanFrom::slots;
}

// Calls f.template operator()<most rows of a tile>(), given that no expert is expected to have more
// than `most` of the `rows`. Small tiles keep more weights in flight. They pay off as long as few
// experts need several of them, since each tile reads the weights again, from L2. The limits in
// rows per expert were measured on an H200, docs/measured/.
template <class F>
void with_tokens(int64_t most, int64_t rows, int64_t experts, F&& f) {
  // A tile of 64 rows costs up to 1 % more, but holds all rows of an expert if none has more.
  int64_t const some = most <= 64 ? 8 : 20;
  if (most <= 8) {
    f.template operator()<8>();
  } else if (most <= 16) {
    f.template operator()<16>();
  } else if (most <= 32 || rows <= some * experts) {
    f.template operator()<32>();
  } else {
    f.template operator()<64>();
  }
}

}  // namespace guild::cuda::sm90
