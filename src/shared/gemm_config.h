// Everything about a grouped GEMM that must be known at compile time, as one plain value.
#pragma once

namespace guild {

struct GemmConfig {
  int tile_m, tile_n;
  int stages;
  int consumers = 2;  // warpgroups issuing wgmma, 64 rows each

  static constexpr int tile_k = 64;
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int a_bytes() const { return 2 * tile_m * tile_k; }
  constexpr int b_bytes() const { return 2 * tile_n * tile_k; }
  friend constexpr bool operator==(GemmConfig const&, GemmConfig const&) = default;
};

// The tiles we build. Add a row only with a measurement.
inline constexpr GemmConfig kWide{.tile_m = 128, .tile_n = 256, .stages = 4};
inline constexpr GemmConfig kSquare{.tile_m = 128, .tile_n = 128, .stages = 4};

// Columns of tiles that are walked together: 132 blocks then cover about 16 x 8 tiles.
inline constexpr int kBand = 8;

}  // namespace guild
