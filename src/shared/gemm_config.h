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

// The products, which differ in what a tile costs beside its sum. A config lists those it serves.
enum class Products : unsigned {
  rows = 1,           // down projection, up gradient, grouped_mm: boxes of results
  direct = 2,         // the same, stored element by element
  up = 4,             // up projection
  down_gradient = 8,  // reads H
  experts = 16,       // weight gradients
};

struct BuiltConfig {
  GemmConfig config;
  double step_cost;   // of its products, relative to the best
  double outside;     // cycles that a consumer spends on a tile beside the products
  unsigned products;  // that it serves

  constexpr bool serves(Products product) const { return products & unsigned(product); }
};

// The configs that are built. Add a row only with a measurement (docs/measured.md).
inline constexpr BuiltConfig kConfigs[] = {
    // A pair loads a third less from L2: dW1 of sonic30b 8.5 to 7.6 ms, up projection 1 to 5 %.
    {{.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2}, 1.0, 1500, 31},
    {{.tile_m = 128, .tile_n = 256, .stages = 4}, 1.12, 1500, 31},
    // In turns, stores hide behind the other consumer's products: up gradient of fine7b 0.60 to
    // 0.55 ms, down projection of olmoe 1.82 to 1.76. Only without a gather, which it would repeat
    // for more columns of tiles.
    {{.tile_m = 128, .tile_n = 192, .stages = 4, .consumers = 2, .in_turns = true},
     1.03,
     8000,
     unsigned(Products::rows)},
};

// Columns of A over which one tile of the down gradient sums <g, A>, a part of dS.
inline constexpr int kScoreColumns = 256;
static_assert([] {
  for (auto const& built : kConfigs) {
    if (built.serves(Products::down_gradient) && built.config.tile_n != kScoreColumns) return false;
  }
  return true;
}());

// What is known of a product before it is launched. ragged: `groups` groups share `rows` rows;
// otherwise each has that many, and sums over an unknown length.
struct TileCount {
  int64_t rows = 0, groups = 0, columns = 0, inner = 0;
  bool ragged = true;
};

// Expected time, up to a factor. Groups of unknown sizes leave half a tile empty on average.
constexpr double expected_cost(BuiltConfig const& built, TileCount const& x) {
  GemmConfig const& c = built.config;
  int64_t const tile = c.cluster_m();
  double const down = x.ragged ? double(x.rows) / double(tile) + double(x.groups) / 2
                               : double((x.rows + tile - 1) / tile * x.groups);
  double const tiles = down * c.cluster * double((x.columns + c.tile_n - 1) / c.tile_n);
  double const steps = double((x.inner + c.tile_k - 1) / c.tile_k);
  double const sum = built.step_cost * steps * c.tile_m * c.tile_n / 32;
  if (!c.in_turns) return tiles * (sum + built.outside);
  double const chain = (sum + built.outside) / c.consumers;  // a consumer's own time, a tile
  return tiles * (sum > chain ? sum : chain);
}

// The config that is expected to take the least time, as its index in kConfigs.
constexpr int choose_config(Products product, TileCount const& count) {
  int best = -1;
  double least = 0;
  for (int i = 0; i < int(sizeof kConfigs / sizeof *kConfigs); ++i) {
    if (!kConfigs[i].serves(product)) continue;
    double const cost = expected_cost(kConfigs[i], count);
    if (best < 0 || cost < least) best = i, least = cost;
  }
  return best;
}

// Columns of tiles that are walked together: 132 blocks then cover about 16 x 8 tiles.
inline constexpr int kBand = 8;

}  // namespace guild
