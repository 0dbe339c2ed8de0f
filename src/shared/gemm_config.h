// GemmConfig: the compile-time parameters of a grouped GEMM. kConfigs lists the configs that are
// built; choose_config() picks one for a product by a cost model.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "shared/dtype.h"
#include "shared/gpu.h"
#include "shared/tiles.h"

namespace guild {

struct GemmConfig {
  int tile_m, tile_n;
  int stages;
  int cluster = 1;        // blocks with neighbouring row tiles, which share the tile of B
  int consumers = 2;      // warpgroups issuing wgmma
  bool in_turns = false;  // ping-pong: each consumer takes every other tile, not half of every tile

  static constexpr int tile_k = 128 / kElementBytes;            // a swizzled row of shared memory
  constexpr int cluster_m() const { return tile_m * cluster; }  // rows of a cluster's tile
  constexpr int consumer_rows() const { return in_turns ? tile_m : tile_m / consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int a_bytes() const { return kElementBytes * tile_m * tile_k; }
  constexpr int b_bytes() const { return kElementBytes * tile_n * tile_k; }
  friend constexpr bool operator==(GemmConfig const&, GemmConfig const&) = default;
};

// The products; each has its own cost per config.
enum class Product : int {
  rows,           // down projection, up gradient, grouped_mm: results stored by TMA
  direct,         // the same, stored element by element
  up,             // up projection
  down_gradient,  // reads H
  experts,        // weight gradients
};
inline constexpr int kProducts = 5;

struct BuiltConfig {
  GemmConfig config;
  double step_cost[kProducts];  // of one K step, relative to a pair of blocks; 0: cannot be used
  double outside;               // cycles per tile that a consumer spends outside the main loop
  // Time of a tile of at most 64 rows relative to a whole one, in products by row: only one
  // consumer multiplies, bound by the shared-memory traffic of B.
  double half = 1;
  // Relative change of step_cost per (padding columns / columns): compared with pairs, padding
  // costs single blocks less and consumers in turns more.
  double spare[kProducts] = {};
  double start = 0;  // cycles that a launch takes longer than one of single blocks

  constexpr bool serves(Product product) const { return step_cost[int(product)] > 0; }
};

// The configs that are built. Add a row only with a measurement (docs/measured/).
inline constexpr BuiltConfig kConfigs[] = {
    // A pair of blocks loads a third less from L2, but each waits for the other, most of all before
    // the first tile. Not for Product::direct, whose wgmma ptxas serialises (C7515); weight
    // gradients stored element by element are not affected.
    {{.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2}, {1, 0, 1, 1, 1}, 200, .9, {}, 4000},
    // A single block leaves no partner idle where rows are few and the tile columns odd in number.
    {{.tile_m = 128, .tile_n = 256, .stages = 4},
     {1.02, 1, 1.05, 1.065, 1.04},
     200,
     .9,
     {0, 0, 0, -.15, -.06}},
    // With in_turns, one consumer's epilogue overlaps the other's main loop, and narrower tiles
    // leave fewer columns empty: 2,880 columns are exactly 15 tiles of 192, but 11.25 of 256. Not
    // for gathered rows, which would be gathered more often.
    {{.tile_m = 128, .tile_n = 192, .stages = 4, .consumers = 2, .in_turns = true},
     {1.035},
     3700,
     .95,
     {.7}},
};

// Columns of a tile of the down gradient, over which it sums <g, A> to one part of dS.
inline constexpr int kScoreColumns = 256;
static_assert([] {
  for (auto const& built : kConfigs) {
    if (built.serves(Product::down_gradient) && built.config.tile_n != kScoreColumns) return false;
  }
  return true;
}());

// What the host knows of a product's size. ragged: `groups` groups share `rows` rows in unknown
// parts; otherwise each group has `rows` rows and sums over `inner` on average.
struct TileCount {
  int64_t rows = 0, groups = 0, columns = 0, inner = 0;
  bool ragged = true;
};

// Tiles that blocks spend time on for one group of `rows` rows, including those for which a block
// idles while its partner works. half: the weight of a tile of at most 64 rows.
inline double tiles_of(GemmConfig const& c, int64_t rows, int64_t across, double half) {
  auto const cost = [&](int64_t rows) { return rows > 64 ? 1 : rows > 0 ? half : 0; };
  MatrixTiles const tiles{.rows = int(rows),
                          .across = int(across),
                          .tile_m = c.cluster_m(),
                          .tail_m = c.cluster == 2 ? c.tile_m : 0,
                          .band = 1,
                          .tile_n = c.tile_n};
  int const tail = tiles.tail();
  if (c.cluster == 2) {
    double const apart = cost(std::min(tail, c.tile_m)) + cost(tail - c.tile_m);
    return 2. * tiles.down() * double(across) + apart * 2 * double((across + 1) / 2);
  }
  int64_t const whole = rows / c.tile_m;
  return (double(whole) + cost(rows - whole * c.tile_m)) * double(across);
}

// The same for all groups. Ragged groups are assumed to get their rows from a random router: a
// normally distributed number with mean rows / groups and the root of that as standard deviation.
inline double expected_tiles(BuiltConfig const& built, TileCount const& x) {
  GemmConfig const& c = built.config;
  int64_t const across = ceil_div(x.columns, c.tile_n);
  if (!x.ragged) return double(x.groups) * tiles_of(c, x.rows, across, /*half=*/1);
  // The medians of eight equally likely parts of the standard normal distribution.
  constexpr double kMiddles[] = {-1.534, -.887, -.489, -.157, .157, .489, .887, 1.534};
  double const mean = double(x.rows) / double(x.groups), spread = std::sqrt(mean);
  double sum = 0;
  for (double const middle : kMiddles) {
    double const rows = std::max(0., mean + middle * spread);
    sum += tiles_of(c, int64_t(rows + .5), across, built.half);
  }
  return double(x.groups) * sum / std::size(kMiddles);
}

// Waves of a persistent launch, that is, tiles per block, if a block works on `at_once` tiles at a
// time. Few waves are rounded up to a multiple of 1 / at_once; of many, the last one is taken to be
// half full.
constexpr double waves(double tiles, int at_once) {
  double const of_each = tiles * at_once / kMultiprocessors;
  double const whole = double(int64_t(of_each)) + (of_each > double(int64_t(of_each)) ? 1 : 0);
  return (of_each < 7 * at_once ? whole : of_each + 0.5) / at_once;
}

// The same where the number of tiles is not known: the mean over up to 5 % fewer and more.
inline double expected_waves(double tiles, int at_once) {
  constexpr double kParts[] = {.95, .975, 1, 1.025, 1.05};
  double sum = 0;
  for (double const part : kParts) sum += waves(tiles * part, at_once);
  return sum / std::size(kParts);
}

// Expected time, up to a factor.
inline double expected_cost(BuiltConfig const& built, Product product, TileCount const& x) {
  GemmConfig const& c = built.config;
  double const steps = double(ceil_div(x.inner, c.tile_k));
  double const wide = double(ceil_div(x.columns, c.tile_n) * c.tile_n);
  double const spare = 1 + built.spare[int(product)] * (wide / double(x.columns) - 1);
  double const sum = built.step_cost[int(product)] * spare * steps * c.tile_m * c.tile_n / 32;
  double const tiles = expected_tiles(built, x);
  double const own = sum + built.outside;  // a consumer's time per tile
  int const at_once = c.in_turns ? c.consumers : 1;
  double const count = x.ragged ? expected_waves(tiles, at_once) : waves(tiles, at_once);
  if (!c.in_turns) return built.start + count * own;
  // The tensor cores serve one sum at a time; a consumer takes every other tile.
  double const per_tile = own / c.consumers;
  return built.start + count * (sum > per_tile ? sum : per_tile);
}

// The config that is expected to take the least time, as its index in kConfigs.
inline int choose_config(Product product, TileCount const& count) {
  int best = -1;
  double least = 0;
  for (int i = 0; i < int(sizeof kConfigs / sizeof *kConfigs); ++i) {
    if (!kConfigs[i].serves(product)) continue;
    double const cost = expected_cost(kConfigs[i], product, count);
    if (best < 0 || cost < least) best = i, least = cost;
  }
  return best;
}

// Tiles across a band of the walk (MatrixTiles): 132 blocks cover about 16 x 8 tiles.
inline constexpr int kBand = 8;

}  // namespace guild
