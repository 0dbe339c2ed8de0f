// Host side of the products for tens to hundreds of rows per expert: launches.
#pragma once
#include <algorithm>

#include "cuda/device.h"
#include "cuda/shared_memory.h"
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/decode/tall.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/stage_map.h"

namespace guild::cuda::sm90 {

// Rows of weights in groups of eight: alternating between gate and up, or of one matrix. n: rows of
// one part.
template <class T>
CUtensorMap tall_weights(ConstWeight const& first, ConstWeight const& second, int64_t experts,
                         int64_t n, int64_t k, Pairing pairing, char const* name) {
  int64_t const row = first.out_stride;
  int64_t const apart = (static_cast<T const*>(second.data) - static_cast<T const*>(first.data));
  bool const alternate = pairing == Pairing::alternate;
  return eights_map(first.data, dtype_of<T>(),
                    {.k = k,
                     .rows = n,
                     .parts = pairing == Pairing::none ? 1 : 2,
                     .experts = places(first, experts),
                     .row_stride = alternate ? 2 * row : row,
                     .part_stride = pairing == Pairing::halves ? apart : row,
                     .eight_stride = alternate ? 16 * row : 8 * row,
                     .expert_stride = first.expert_stride,
                     .box_rows = 128},
                    name);
}

// The most rows for which a group gets narrow tiles. Where tiles are few, narrow and broad ones
// finish at different times, so most groups should have the same kind. Measured on an H200,
// docs/measured/.
inline int narrow_up_to(int64_t rows, int64_t groups, int64_t columns, int part_columns) {
  constexpr int64_t kMany = 1500, kLow = 48;
  bool const many = groups * ceil_div(columns, 2 * part_columns) > kMany;
  return many || rows <= kLow * groups ? kNarrowRows : kNarrowRows / 2;
}

template <class Product>
__global__ void __launch_bounds__(Product::kThreads, 1) tall_kernel(
    __grid_constant__ typename Product::Params const p) {
  Product::run(p);
}

template <class Product>
void launch_tall(typename Product::Params const& params, int64_t rows, Queue const& queue) {
  static AllowedOn allowed;
  auto* const kernel = tall_kernel<Product>;
  allow_shared_memory(kernel, Product::kBytes, allowed, "shared memory of a tall product");
  int64_t const high = rows / kFastRows + std::min<int64_t>(rows, params.groups.groups);
  int64_t const tiles = high * ceil_div(params.columns, Product::kLeastColumns);
  unsigned const blocks = unsigned(std::min<int64_t>(tiles, multiprocessors(queue)));
  cuda_check(launch_kernel(kernel,
                           {.blocks = blocks,
                            .threads = Product::kThreads,
                            .bytes = Product::kBytes,
                            .stream = queue.stream,
                            .early = true},
                           params),
             "launch of a tall product");
}

}  // namespace guild::cuda::sm90
