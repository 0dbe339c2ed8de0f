// Host side of the products with a low-rank term: their config, and what their loader needs more.
#pragma once
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/low_rank_loader.cuh"

namespace guild::cuda {

// The one config that these kernels are built in.
inline constexpr GemmConfig kLowRankConfig = kConfigs[1].config;
static_assert(kLowRankConfig.cluster == 1 && !kLowRankConfig.in_turns);

template <class Base>
using LowRankLoader = WithLowRank<Base, kLowRankConfig>;

// Goes on from params of the product without the term. columns: of a weight's tensor map;
// pair_columns: as in WeightLoader.
template <class T, Major major, class Params>
void add_low_rank(Params& params, LowRankOperand const& x, int64_t rows, int64_t columns,
                  bool pair_columns) {
  constexpr GemmConfig c = kLowRankConfig;
  auto const map = [&](ConstWeight const& b) {
    return weight_map<T, c, major>(b, params.work.groups.groups, columns, x.rank, "low_rank.b");
  };
  params.load.steps = int(ceil_div(params.work.inner, c.tile_k));
  params.load.t = row_map<T>(x.t, rows, x.rank, 1, 64, "low_rank.t");
  params.load.low_rank = {{map(x.b[0]), map(x.b[1])}, pair_columns, INT32_MAX};
  params.work.inner = params.load.steps * c.tile_k + int(x.rank);
}

}  // namespace guild::cuda
