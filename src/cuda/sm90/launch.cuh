// Host side of the grouped products: tensor maps, shared-memory limits, launches.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/sm90/forced_config.h"
#include "cuda/sm90/kernel.cuh"
#include "guild/cuda.h"

namespace guild::cuda {

inline void cuda_check(cudaError_t e, char const* what) {
  require(e == cudaSuccess, what, ": ", cudaGetErrorName(e), ": ", cudaGetErrorString(e));
}

// A stack of 16-bit matrices for a tensor map: x is contiguous; strides of y, z and w in elements.
struct MapShape {
  int64_t x, y, z, y_stride, z_stride;
  int box_x, box_y, box_z;
  int64_t w = 0, w_stride = 0;  // a fourth dimension where w > 0; boxes are 1 deep there
};
CUtensorMap tensor_map(void const* data, DType dtype, MapShape const& shape, char const* name);

// How many multiprocessors a launch on this queue may use.
int multiprocessors(Queue const& queue);

template <class T>
constexpr DType dtype_of() {
  return std::is_same_v<T, __half> ? DType::float16 : DType::bfloat16;
}

inline int64_t row_stride(ConstRows const& rows, int64_t columns) {
  return rows.stride == 0 ? columns : rows.stride;
}

// Rows as (columns, halves, rows) with boxes of 64 x 1 x box_rows.
template <class T>
CUtensorMap row_map(ConstRows rows, int64_t count, int64_t columns, int halves, int box_rows,
                    char const* name) {
  int64_t const stride = row_stride(rows, columns * halves);
  return tensor_map(rows.data, dtype_of<T>(),
                    {columns, halves, count, columns, stride, 64, 1, box_rows}, name);
}

// The map's base lies 64 rows before the matrix, as RowOutput describes; store() addresses the
// tile's own rows only.
template <class T>
RowOutput<T> row_output(Rows rows, int64_t count, int64_t columns, int halves, char const* name) {
  RowOutput<T> out{};
  if (rows.data == nullptr) return out;
  int64_t const stride = row_stride(rows, columns * halves);
  out.map = tensor_map(static_cast<T*>(rows.data) - 64 * stride, dtype_of<T>(),
                       {.x = columns,
                        .y = halves,
                        .z = 64,
                        .y_stride = columns,
                        .z_stride = stride,
                        .box_x = 64,
                        .box_y = 1,
                        .box_z = 64,
                        .w = count + 64,
                        .w_stride = stride},
                       name);
  out.present = true;
  out.columns = int(columns);
  return out;
}

// Expert weights, seen as (E, n, k), as the B operand of C's tiles.
template <class T, GemmConfig C, Major major>
CUtensorMap weight_map(void const* data, int64_t experts, int64_t n, int64_t k,
                       int64_t expert_stride, int64_t row_stride, char const* name) {
  MapShape shape = major == Major::K
                       ? MapShape{k, n, experts, row_stride, expert_stride, 64, C.tile_n / 2, 1}
                       : MapShape{n, k, experts, row_stride, expert_stride, 64, 64, 1};
  return tensor_map(data, dtype_of<T>(), shape, name);
}

// Calls f with the 16-bit element type of `dtype`.
template <class F>
void with_type(DType dtype, F&& f) {
  if (dtype == DType::float16) {
    f(__half());
  } else {
    f(__nv_bfloat16());
  }
}

// Calls f(std::integral_constant<Known, known>{}).
template <class F>
void with_known(Known known, F&& f) {
  if (known == Known::swiglu) {
    f(std::integral_constant<Known, Known::swiglu>{});
  } else {
    f(std::integral_constant<Known, Known::nothing>{});
  }
}

// A stride in units of 16 bytes: gathering kernels compute row offsets in them with 32 bits.
inline uint32_t addressable_stride(int64_t rows, int64_t stride, char const* name) {
  require(rows * (stride / 8) < int64_t(kNone), name,
          ": expected fewer than 2^35 elements on CUDA, got ", rows, " rows ", stride, " apart");
  return uint32_t(stride / 8);
}

template <Product product, int index, class F>
void call_with_config(F&& f) {
  if constexpr (kConfigs[index].serves(product)) f.template operator()<kConfigs[index].config>();
}

// Calls f.template operator()<config>() with the config that choose_config() expects to be fastest,
// or with the one that a test forces.
template <Product product, class F>
void with_config(TileCount const& count, F&& f) {
  bool const forced = forced_config >= 0 && kConfigs[forced_config].serves(product);
  int const choice = forced ? forced_config : choose_config(product, count);
  [&]<int... i>(std::integer_sequence<int, i...>) {
    ((i == choice && (call_with_config<product, i>(f), true)) || ...);
  }(std::make_integer_sequence<int, int(std::size(kConfigs))>());
}

// Sets the A operand of a product by row: X or dO, by token where the loader gathers.
template <class T, GemmConfig C, class Params>
void fill_rows(Params& load, ConstRows const& a, Routing const& routing, Sizes const& sizes,
               char const* name) {
  if constexpr (requires { load.row; }) {
    load.a = static_cast<T const*>(a.data);
    load.stride = addressable_stride(sizes.tokens, row_stride(a, sizes.hidden), name);
    load.row = routing.row_token;
    load.tokens = int(sizes.tokens);
    load.k = int(sizes.hidden);
  } else {
    load.a = row_map<T>(a, sizes.rows(), sizes.hidden, 1, C.tile_m, name);
  }
}

// Calls f.template operator()<T, major of the weight, whether A is gathered>().
template <class F>
void with_product(DType dtype, bool k_major, bool gathered, F&& f) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    auto const by_loader = [&](auto major) {
      if (gathered) {
        f.template operator()<T, major.value, true>();
      } else {
        f.template operator()<T, major.value, false>();
      }
    };
    if (k_major) {
      by_loader(std::integral_constant<Major, Major::K>{});
    } else {
      by_loader(std::integral_constant<Major, Major::MN>{});
    }
  });
}

template <class T, GemmConfig C, Major major, bool gathered>
using RowLoader = std::conditional_t<gathered, GatheredRows<T, C, major>, TmaRows<T, C, major>>;

// An upper bound on the number of clusters' tiles, over groups of unknown sizes.
template <GemmConfig C>
int64_t most_tiles(int64_t rows, int64_t groups, int64_t columns, int64_t tile_n) {
  return (rows / C.cluster_m() + groups) * ceil_div(columns, tile_n);
}

// Up to this many waves tiles are scheduled statically: clearing the counter takes 2 us.
inline constexpr int kFewWaves = 4;

// The counter from which clusters claim tiles (dynamic scheduling). Clusters then work on
// neighbouring tiles at the same time and find each other's operands in L2; with static scheduling
// they drift apart.
inline int32_t* cleared_counter(Queue const& queue) {
  if (queue.counter == nullptr) return nullptr;
  cuda_check(cudaMemsetAsync(queue.counter, 0, sizeof(int32_t), queue.stream),
             "clearing a counter");
  return queue.counter;
}

// tiles: an upper bound on the number of clusters' tiles.
template <class Kernel>
void launch(typename Kernel::Params params, int64_t tiles, Queue const& queue) {
  if (tiles == 0) return;
  constexpr int bytes = sizeof(typename Kernel::SharedStorage);
  cuda_check(cudaFuncSetAttribute(run<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory of a grouped product");
  constexpr int cluster = Kernel::config.cluster;
  int const clusters = std::max(1, multiprocessors(queue) / cluster);
  if (cluster > 1 && params.work.taken == nullptr && tiles > kFewWaves * clusters) {
    params.work.taken = cleared_counter(queue);
  }
  cudaLaunchAttribute shape{};
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(std::min<int64_t>(tiles, clusters) * cluster));
  config.blockDim = dim3(Kernel::config.threads());
  config.dynamicSmemBytes = bytes;
  config.stream = queue.stream;
  config.attrs = &shape;
  config.numAttrs = cluster > 1 ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, run<Kernel>, params), "launch of a grouped product");
}

}  // namespace guild::cuda
