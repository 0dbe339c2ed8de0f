// Everything about a grouped GEMM that must be known at compile time, as one plain value; which of
// them are built, and which one a product takes.
#pragma once
#include <cstdint>

namespace guild {

struct GemmConfig {
  int tile_m, tile_n;
  int stages;
  int cluster = 1;        // blocks that share the tiles of B: their row tiles are neighbours
  int consumers = 2;      // warpgroups issuing wgmma
  bool in_turns = false;  // consumers take whole tiles in turns, in place of 64 rows each

  static constexpr int tile_k = 64;
  constexpr int cluster_m() const { return tile_m * cluster; }  // rows of a cluster's tile
  constexpr int consumer_rows() const { return in_turns ? tile_m : tile_m / consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int a_bytes() const { return 2 * tile_m * tile_k; }
  constexpr int b_bytes() const { return 2 * tile_n * tile_k; }
  friend constexpr bool operator==(GemmConfig const&, GemmConfig const&) = default;
};

// The products, which differ in what a config costs them.
enum class Product : int {
  rows,           // down projection, up gradient, grouped_mm: boxes of results
  direct,         // the same, stored element by element
  up,             // up projection
  down_gradient,  // reads H
  experts,        // weight gradients
};
inline constexpr int kProducts = 5;

struct BuiltConfig {
  GemmConfig config;
  double step_cost[kProducts];  // of a step of its sums, relative to the best; 0: does not serve
  double outside;               // cycles that a consumer spends on a tile beside its sum

  constexpr bool serves(Product product) const { return step_cost[int(product)] > 0; }
};

// The configs that are built. Add a row only with a measurement (docs/measured/).
inline constexpr BuiltConfig kConfigs[] = {
    // A pair loads a third less from L2, up projection 2 to 10 %, but each waits for the other.
    // Not for products by row that are stored element by element: ptxas serialises their wgmma
    // (C7515), though not that of weight gradients stored so.
    {{.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2}, {1, 0, 1, 1, 1}, 900},
    // Alone a block wastes no column of tiles where their number is odd and rows are few.
    {{.tile_m = 128, .tile_n = 256, .stages = 4}, {1.05, 1, 1.05, 1.03, 1.02}, 400},
    // In turns, packing and stores hide behind the other consumer's products, which pays where sums
    // are short: fine7b's up gradient 0.53 to 0.50 ms. Only without a gather, which it would repeat
    // for more columns of tiles.
    {{.tile_m = 128, .tile_n = 192, .stages = 4, .consumers = 2, .in_turns = true}, {1.045}, 3500},
};

// Columns of A over which one tile of the down gradient sums <g, A>, a part of dS.
inline constexpr int kScoreColumns = 256;
static_assert([] {
  for (auto const& built : kConfigs) {
    if (built.serves(Product::down_gradient) && built.config.tile_n != kScoreColumns) return false;
  }
  return true;
}());

// What is known of a product before it is launched. ragged: `groups` groups share `rows` rows;
// otherwise each has that many, and sums over `inner` on average.
struct TileCount {
  int64_t rows = 0, groups = 0, columns = 0, inner = 0;
  bool ragged = true;
};

// Tiles of blocks, empty ones included. Groups of unknown sizes leave half a tile empty on average,
// and every other one leaves a pair of blocks one row tile: two of its columns, the last one
// perhaps alone.
constexpr double expected_tiles(GemmConfig const& c, TileCount const& x) {
  int64_t const across = (x.columns + c.tile_n - 1) / c.tile_n;
  double const idle = c.cluster == 2 ? double(across % 2) : 0;
  if (x.ragged) {
    double const down = double(x.rows) / c.tile_m + double(x.groups) / 2;
    return down * double(across) + idle * double(x.groups) / 2;
  }
  int64_t const down = (x.rows + c.tile_m - 1) / c.tile_m;
  return double(x.groups) * (double(down * across) + (down % 2 != 0 ? idle : 0));
}

// How many tiles one after another a block takes of a launch that fills the GPU, if it works on
// `at_once` of them: whole ones of each where they are few, else half a one is left over on
// average.
constexpr double rounds_of(double tiles, int at_once) {
  constexpr int kBlocks = 132;  // of an H100 or H200
  double const of_each = tiles * at_once / kBlocks;
  double const whole = double(int64_t(of_each)) + (of_each > double(int64_t(of_each)) ? 1 : 0);
  return (of_each < 7 * at_once ? whole : of_each + 0.5) / at_once;
}

// Expected time, up to a factor.
constexpr double expected_cost(BuiltConfig const& built, Product product, TileCount const& x) {
  GemmConfig const& c = built.config;
  double const steps = double((x.inner + c.tile_k - 1) / c.tile_k);
  double const sum = built.step_cost[int(product)] * steps * c.tile_m * c.tile_n / 32;
  double const tiles = expected_tiles(c, x);
  double const own = sum + built.outside;  // a consumer's time, a tile
  double const rounds = rounds_of(tiles, c.in_turns ? c.consumers : 1);
  if (!c.in_turns) return rounds * own;
  double const chain = own / c.consumers;
  return rounds * (sum > chain ? sum : chain);
}

// The config that is expected to take the least time, as its index in kConfigs.
constexpr int choose_config(Product product, TileCount const& count) {
  int best = -1;
  double least = 0;
  for (int i = 0; i < int(sizeof kConfigs / sizeof *kConfigs); ++i) {
    if (!kConfigs[i].serves(product)) continue;
    double const cost = expected_cost(kConfigs[i], product, count);
    if (best < 0 || cost < least) best = i, least = cost;
  }
  return best;
}

// Columns of tiles that are walked together: 132 blocks then cover about 16 x 8 tiles.
inline constexpr int kBand = 8;

}  // namespace guild
