// Everything about a grouped GEMM that must be known at compile time, as one plain value; which of
// them are built, and which one a product takes.
#pragma once
#include <cstdint>

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

struct BuiltConfig {
  GemmConfig config;
  double row_cost;  // time of a row that its tiles cover, relative to the best
};

// The configs that are built. Add a row only with a measurement (docs/measured.md).
inline constexpr BuiltConfig kConfigs[] = {
    // A pair loads a third less from L2: dW1 of sonic30b 8.5 to 7.6 ms, up projection 1 to 5 %.
    {{.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2}, 1.0},
    {{.tile_m = 128, .tile_n = 256, .stages = 4}, 1.12},
};

// Columns of A over which one tile of the down gradient sums <g, A>, a part of dS.
inline constexpr int kScoreColumns = 256;
static_assert([] {
  for (auto const& built : kConfigs) {
    if (built.config.tile_n != kScoreColumns) return false;
  }
  return true;
}());

// The rows that tiles of a config cover: rows of D over groups of unknown sizes, each of which
// leaves half a tile empty on average, or of `groups` matrices of as many rows each.
constexpr double covered_rows(GemmConfig const& c, int64_t rows, int64_t groups, bool ragged) {
  int64_t const tile = c.cluster_m();
  if (ragged) return double(rows) + double(groups * tile) / 2;
  return double((rows + tile - 1) / tile * tile * groups);
}

// The config that is expected to take the least time, as its index in kConfigs. ragged: `groups`
// groups share `rows` rows; otherwise each has that many.
constexpr int choose_config(int64_t rows, int64_t groups, bool ragged) {
  int best = 0;
  double least = -1;
  for (int i = 0; i < int(sizeof kConfigs / sizeof *kConfigs); ++i) {
    double const cost =
        kConfigs[i].row_cost * covered_rows(kConfigs[i].config, rows, groups, ragged);
    if (least < 0 || cost < least) best = i, least = cost;
  }
  return best;
}

// Columns of tiles that are walked together: 132 blocks then cover about 16 x 8 tiles.
inline constexpr int kBand = 8;

}  // namespace guild
