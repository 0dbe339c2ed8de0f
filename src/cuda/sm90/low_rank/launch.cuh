// Host side of the products with a low-rank term: their config, and what else their loader needs.
#pragma once
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/low_rank/loader.cuh"

namespace guild::cuda {

// The one config that these kernels are built in.
inline constexpr GemmConfig kLowRankConfig = kConfigs[1].config;
static_assert(kLowRankConfig.cluster == 1 && !kLowRankConfig.in_turns);

template <class Base>
using LowRankLoader = WithLowRank<Base, kLowRankConfig>;

// Adds the term to the params of the product without it. columns: of a weight's tensor map;
// pair_columns: as in WeightLoader.
template <class T, Major major, class Params>
void add_low_rank(Params& params, LowRankOperand const& x, int64_t rows, int64_t columns,
                  bool pair_columns) {
  constexpr GemmConfig c = kLowRankConfig;
  params.load.steps = int(ceil_div(params.work.inner, c.tile_k));
  params.load.t = row_map<T>(x.t, rows, x.rank, 1, 64, "low_rank.t");
  params.load.low_rank =
      weight_loader<T, c, major>(x.b[0], x.b[1], params.work.groups.groups, columns, x.rank,
                                 pair_columns, INT32_MAX, "low_rank.b");
  params.work.inner = params.load.steps * c.tile_k + int(x.rank);
}

}  // namespace guild::cuda
