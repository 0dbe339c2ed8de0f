// Everything about a grouped GEMM that must be known at compile time, as one plain value.
#pragma once

namespace guild {

struct GemmConfig {
  int tile_m, tile_n;
  int stages;
  int cluster = 1;    // blocks that share the tiles of B: their row tiles are neighbours
  int consumers = 2;  // warpgroups issuing wgmma: 64 rows of a tile each

  static constexpr int tile_k = 64;
  constexpr int cluster_m() const { return tile_m * cluster; }  // rows of a cluster's tile
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int a_bytes() const { return 2 * tile_m * tile_k; }
  constexpr int b_bytes() const { return 2 * tile_n * tile_k; }
  friend constexpr bool operator==(GemmConfig const&, GemmConfig const&) = default;
};

// The tiles we build. Add a row only with a measurement.
inline constexpr GemmConfig kWide{.tile_m = 128, .tile_n = 256, .stages = 4};
inline constexpr GemmConfig kWidePair{.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2};

// Columns of A over which one tile of the down gradient sums <g, A>, a part of dS.
inline constexpr int kScoreColumns = kWide.tile_n;

// Whether to pair blocks: each group's last pair wastes half a cluster tile, on average 64 rows.
constexpr bool choose_pairs(long long rows, int groups) { return rows >= 512LL * groups; }

// Columns of tiles that are walked together: 132 blocks then cover about 16 x 8 tiles.
inline constexpr int kBand = 8;

}  // namespace guild
