// Host side of the grouped products: tensor maps, shared-memory limits, launches.
#pragma once
#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/shared_memory.h"
#include "cuda/sm90/forced_config.h"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/tensor_map.h"

namespace guild::cuda {

// Rows as (columns, halves, rows) with boxes of 64 x 1 x box_rows.
template <class T>
CUtensorMap row_map(ConstRows rows, int64_t count, int64_t columns, int halves, int box_rows,
                    char const* name) {
  int64_t const stride = row_stride(rows, columns * halves);
  int64_t const half_stride = halves == 1 ? stride : columns;  // TMA wants multiples of 16 bytes
  return tensor_map(rows.data, dtype_of<T>(),
                    {columns, halves, count, half_stride, stride, kBoxColumns, 1, box_rows}, name);
}

// Rows in boxes of 64 x 64 x 1 x 1 that can stop before 64 rows; for their coordinates see
// ClippedCoordinate (arch/copy.cuh). The stride of the last dimension is 2^34 bytes less one row,
// so its coordinate kClip adds 2^64 bytes, which wrap to 0, less kClip rows. The map's base is the
// matrix itself, as it must be: for a box wholly past the columns TMA touches the base and faults
// if no memory is there. Triton's ragged descriptors wrap in the same way.
template <class T>
CUtensorMap clipped_map(ConstRows rows, int64_t count, int64_t columns, char const* name) {
  int64_t const stride = row_stride(rows, columns);
  constexpr int64_t wrap = (int64_t(1) << 34) / kElementBytes;
  return tensor_map(rows.data, dtype_of<T>(),
                    {.x = columns,
                     .y = kClip,
                     .z = count + 1,
                     .y_stride = stride,
                     .z_stride = stride,
                     .box_x = kBoxColumns,
                     .box_y = 64,
                     .box_z = 1,
                     .w = int64_t(kClip) + 1,
                     .w_stride = wrap - stride},
                    name);
}

// RowOutput's map, with boxes of `box_rows`. Its base lies 64 rows before the matrix, see
// RowOutput; store() addresses only the tile's own rows.
template <class T>
CUtensorMap output_map(Rows const& rows, int64_t count, int64_t columns, int halves, int box_rows,
                       char const* name) {
  int64_t const stride = row_stride(rows, columns * halves);
  return tensor_map(static_cast<T*>(rows.data) - 64 * stride, dtype_of<T>(),
                    {.x = columns,
                     .y = halves,
                     .z = 64,
                     .y_stride = columns,
                     .z_stride = stride,
                     .box_x = kBoxColumns,
                     .box_y = 1,
                     .box_z = box_rows,
                     .w = count + 64,
                     .w_stride = stride},
                    name);
}
template <class T>
RowOutput<T> row_output(Rows rows, int64_t count, int64_t columns, int halves, char const* name) {
  RowOutput<T> out{};
  if (rows.data == nullptr) return out;
  out.map = output_map<T>(rows, count, columns, halves, 64, name);
  out.present = true;
  out.columns = int(columns);
  return out;
}

// The number of matrices that a map spans. With expert_at, a matrix may lie anywhere.
template <class W>
int64_t places(W const& w, int64_t experts) {
  return w.expert_at == nullptr ? experts : INT32_MAX;
}

// Expert weights (E, n, k) in boxes of 64 of k and `rows` of n, 64 where n is contiguous.
template <Major major>
MapShape weight_shape(ConstWeight const& w, int64_t experts, int64_t n, int64_t k, int rows) {
  constexpr int box = kBoxColumns;
  int64_t const z = places(w, experts), stride = z == 1 ? 0 : w.expert_stride;
  return major == Major::K ? MapShape{k, n, z, w.out_stride, stride, box, rows, 1}
                           : MapShape{n, k, z, w.in_stride, stride, box, box, 1};
}

// The B operand of C's tiles from one or two weights (E, n, k); see WeightLoader.
template <class T, GemmConfig C, Major major>
WeightLoader<C, major> weight_loader(ConstWeight const& first, ConstWeight const& second,
                                     int64_t experts, int64_t n, int64_t k, bool pair_columns,
                                     int half_steps, char const* name) {
  auto const map = [&](ConstWeight const& w) {
    return tensor_map(w.data, dtype_of<T>(), weight_shape<major>(w, experts, n, k, C.tile_n / 2),
                      name);
  };
  return {{map(first), map(second)}, pair_columns, half_steps, {first.expert_at, second.expert_at}};
}

// Calls f(std::integral_constant<StaticActivation, known>{}), where only SwiGLU has a kernel of its
// own.
template <class F>
void with_swiglu_or_any(StaticActivation known, F&& f) {
  if (known == StaticActivation::swiglu) {
    f(std::integral_constant<StaticActivation, StaticActivation::swiglu>{});
  } else {
    f(std::integral_constant<StaticActivation, StaticActivation::any>{});
  }
}
// The same where gpt-oss's activation has one, too.
template <class F>
void with_static_activation(StaticActivation known, F&& f) {
  if (known == StaticActivation::gpt_oss) {
    f(std::integral_constant<StaticActivation, StaticActivation::gpt_oss>{});
  } else {
    with_swiglu_or_any(known, f);
  }
}

template <Product product, int index, class F>
void call_with_config(F&& f) {
  if constexpr (kConfigs[index].serves(product)) f.template operator()<kConfigs[index].config>();
}

// Calls f.template operator()<config>() with the config that choose_config() expects to be fastest,
// or the one forced by a test.
template <Product product, class F>
void with_config(TileCount const& count, F&& f) {
  bool const forced = forced_config >= 0 && kConfigs[forced_config].serves(product);
  int const choice = forced ? forced_config : choose_config(product, count);
  [&]<int... i>(std::integer_sequence<int, i...>) {
    ((i == choice && (call_with_config<product, i>(f), true)) || ...);
  }(std::make_integer_sequence<int, int(std::size(kConfigs))>());
}

// The A operand of the up projection or the down gradient: contiguous rows, or gathered by token.
struct RowOperand {
  ConstRows a;  // (rows, k), or (tokens, k), read at row_token[r]
  int64_t rows, tokens, k;
  int32_t const* row_token;
};
template <class T, GemmConfig C, Major major>
void fill_rows(typename TmaRows<T, C, major>::Params& load, RowOperand const& x, char const* name) {
  load.a = row_map<T>(x.a, x.rows, x.k, 1, 64, name);
}
template <class T, GemmConfig C, Major major>
void fill_rows(typename GatheredRows<T, C, major>::Params& load, RowOperand const& x,
               char const* name) {
  load.a = static_cast<T const*>(x.a.data);
  load.stride = addressable_stride(x.tokens, row_stride(x.a, x.k), name);
  load.row = x.row_token;
  load.tokens = int(x.tokens);
  load.k = int(x.k);
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

template <GemmConfig C>
int64_t most_tiles(int64_t rows, RowTiles const& work) {
  return most_tiles<C>(rows, work.groups.groups, int64_t(work.across) * work.tile_n, work.tile_n);
}

// Whether tiles are claimed (dynamic scheduling) rather than dealt out (static). Claiming keeps
// clusters on neighbouring tiles, which find each other's operands in L2; statically scheduled
// clusters drift apart. With few waves tiles are not claimed, since clearing a counter can take 2
// us, unless other kernels run concurrently, where blocks start at different times.
inline bool claims_tiles(Queue const& queue, int64_t tiles, int clusters) {
  constexpr int kFewWaves = 4;
  return tiles > (queue.shared ? 1 : kFewWaves) * clusters;
}

// tiles: an upper bound on the number of clusters' tiles.
template <class Kernel>
void launch(typename Kernel::Params params, int64_t tiles, Queue const& queue) {
  if (tiles == 0) return;
  constexpr int bytes = sizeof(typename Kernel::SharedStorage);
  static AllowedOn allowed;
  allow_shared_memory(run<Kernel>, bytes, allowed, "shared memory of a grouped product");
  constexpr int cluster = Kernel::config.cluster;
  int const clusters = std::max(1, multiprocessors(queue) / cluster);
  if (params.work.taken == nullptr && claims_tiles(queue, tiles, clusters)) {
    params.work.taken = cleared_counter(queue);
  }
  unsigned const blocks = unsigned(std::min<int64_t>(tiles, clusters) * cluster);
  cuda_check(launch_kernel(run<Kernel>,
                           {.blocks = blocks,
                            .threads = Kernel::config.threads(),
                            .bytes = bytes,
                            .stream = queue.stream,
                            .cluster = cluster},
                           params),
             "launch of a grouped product");
}

}  // namespace guild::cuda
