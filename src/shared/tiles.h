// The output tiles of a ragged grouped GEMM. Pure index arithmetic: tested on the CPU.
//
// ends[e] is where group e ends along the ragged dimension and group e + 1 begins. Walks over rows
// clamp ends to [previous end, total], so that no input makes a kernel access memory out of bounds;
// sums over rows clamp each end to [0, total].
#pragma once
#include <cstdint>

#include "shared/ceil_div.h"
#include "shared/host_device.h"

namespace guild {

struct alignas(16) Tile {
  int expert = 0;
  int row = 0, col = 0;  // first row and column of the output tile
  int rows = 0;          // valid rows, <= tile_m
  int inner = 0;         // length of the sum over K
  int inner_row = 0;     // ragged inner dimension: the first row of A and B to sum over
  bool apart = false;    // the blocks of a cluster split it by columns (two tiles), not by rows
};

// The part of a cluster's tile that block `rank` works on: tile_m of its rows or, where `apart`,
// tile_n of its columns. It may be empty.
GUILD_HD Tile share_of(Tile tile, int rank, int tile_m, int tile_n, int columns) {
  if (tile.apart) {
    tile.col += rank * tile_n;
    if (tile.col >= columns) tile.rows = 0;
  } else {
    tile.row += rank * tile_m;
    tile.rows -= rank * tile_m;
  }
  tile.rows = tile.rows < 0 ? 0 : tile.rows < tile_m ? tile.rows : tile_m;
  return tile;
}

// Block `index` of 64 rows of a tile. Past the tile's last row, rows <= 0.
GUILD_HD Tile row_block(Tile tile, int index) {
  tile.row += 64 * index;
  int const left = tile.rows - 64 * index;
  tile.rows = left < 64 ? left : 64;
  return tile;
}

// The position of matrix `index`, in units of the stride between matrices: at[index], where `at` is
// a list such as a weight's expert_at, or `index` itself if `at` is null.
GUILD_HD int placed(int32_t const* at, int index) { return at == nullptr ? index : at[index]; }

struct Groups {
  int32_t const* ends;  // (groups); null: every group has total / groups
  int groups, total;
  bool has_start = false;  // ends[-1] says where the first group begins; else at 0

  // Where a group begins, unless one before it ends later.
  GUILD_HD int start(int group) const { return group > 0 || has_start ? bound(group - 1) : 0; }

  // Where a group ends, unless one before it ends later.
  GUILD_HD int bound(int group) const {
    if (ends == nullptr) return (group + 1) * (total / groups);
    int const e = ends[group];
    return e < 0 ? 0 : e > total ? total : e;
  }
  GUILD_HD int end(int group, int begin) const {
    int const e = bound(group);
    return e < begin ? begin : e;
  }
};

// The rows of a layer's experts: offsets (E + 1).
inline Groups expert_groups(int32_t const* offsets, int64_t experts, int64_t rows) {
  return {offsets + 1, int(experts), int(rows), /*has_start=*/true};
}

// The output tiles of one matrix of `rows` rows: `across` tiles side by side, of tile_m rows each.
// If tail_m (tile_m / 2) is set, the remainder of rows / tile_m gets tiles of tail_m rows instead
// if it is at most tail_m or, where `across` is even so that no block idles, at most 1.5 tail_m.
// Two neighbouring tiles of tail_m rows count as one tile with `apart` set.
//
// Tiles are numbered in bands of `band` columns of tiles, an even number with tail_m, row by row
// within a band. Blocks that run at the same time then share few rows of A and few columns of B,
// which stay in L2.
struct MatrixTiles {
  int rows, across, tile_m, tail_m, band, tile_n;

  GUILD_HD int tail() const {
    if (tail_m == 0) return 0;
    int const left = rows % tile_m, most = across % 2 == 0 ? tail_m + tail_m / 2 : tail_m;
    return left <= most ? left : 0;
  }
  GUILD_HD int tails() const { return tail() > tail_m ? 2 : int(tail() > 0); }
  GUILD_HD int down() const { return (rows - tail() + tile_m - 1) / tile_m; }
  GUILD_HD int count() const { return in_band(across); }
  GUILD_HD Tile at(int index) const {
    int const bands = across / band, before = index / in_band(band);  // whole ones
    int const first = (before < bands ? before : bands) * band;
    int const width = across - first < band ? across - first : band;
    int const local = index - first / band * in_band(band), apart = local - down() * width;
    if (apart < 0) {
      int const row = local / width * tile_m, left = rows - row;
      return {.row = row,
              .col = (first + local % width) * tile_n,
              .rows = left < tile_m ? left : tile_m};
    }
    int const second = int(apart >= pairs(width)), left = tail() - second * tail_m;
    return {.row = rows - left,
            .col = (first + (apart - second * pairs(width)) * 2) * tile_n,
            .rows = left < tail_m ? left : tail_m,
            .apart = true};
  }

 private:
  static GUILD_HD int pairs(int width) { return (width + 1) / 2; }
  GUILD_HD int in_band(int width) const { return down() * width + tails() * pairs(width); }
};

// Groups split the rows of D: each has its rows of A and a B of its own.
struct RowTiles {
  Groups groups;
  int tile_n = 0, across = 0, inner = 0;  // across: tiles side by side
  int tile_m = 0, tail_m = 0, band = 0;   // kernel.cuh sets these

  // Dynamic scheduling: how many tiles the blocks have claimed so far, a counter in global memory
  // that starts at 0. Null: static scheduling, each block or cluster takes every n-th tile.
  int32_t* taken = nullptr;

  static constexpr bool kMayBeEmpty = false;  // no sum is empty: inner > 0
  static constexpr bool kHasOrder = false;    // groups are visited by number

  // A group of at most this many rows stays in L2 as a whole. Its bands are two columns of tiles
  // wide, so that tiles with the same columns of B follow each other, even the last ones of few
  // rows: B, which may be larger than L2, is read from memory only once.
  static constexpr int kFewRows = 1024;

  GUILD_HD MatrixTiles matrix(int begin, int end) const {
    int const rows = end - begin, width = rows <= kFewRows && band > 2 ? 2 : band;
    return {rows, across, tile_m, tail_m, width, tile_n};
  }
  GUILD_HD Tile at(int index, int group, int begin, int end) const {
    Tile tile = matrix(begin, end).at(index);
    tile.expert = group;
    tile.row += begin;
    tile.inner = inner;
    return tile;
  }
};

// Groups split the inner dimension; every group has an output of the same size. Sums differ in
// length, so the order of the tiles matters: the longest should start first.
struct InnerTiles {
  Groups groups;
  int tile_n = 0, rows = 0, across = 0;
  int tile_m = 0, tail_m = 0, band = 0;  // kernel.cuh sets these

  int32_t const* order = nullptr;  // (groups) groups in the order of the walk; null: 0, 1, ...
  int32_t* taken = nullptr;        // as in RowTiles

  static constexpr bool kMayBeEmpty = true;  // a group without rows has an empty sum
  static constexpr bool kHasOrder = true;    // groups are visited in `order`, if given

  GUILD_HD MatrixTiles matrix(int, int) const {
    return {rows, across, tile_m, tail_m, band, tile_n};
  }
  GUILD_HD Tile at(int index, int group, int begin, int end) const {
    Tile tile = matrix(begin, end).at(index);
    tile.expert = group;
    tile.inner = end - begin;
    tile.inner_row = begin;
    return tile;
  }
};

// Walks over every `stride`-th tile, group by group, in one thread. TileFinder does the same with a
// warp, faster: tile_queue.cuh.
template <class Work>
struct TileWalk {
  Work work;
  int next_tile, stride;
  int group = 0, begin = work.groups.start(0), before = 0;  // before: tiles of earlier groups

  GUILD_HD bool next(Tile& tile) {
    for (; group < work.groups.groups; ++group) {
      int const end = work.groups.end(group, begin);
      int const tiles = work.matrix(begin, end).count(), local = next_tile - before;
      if (local < tiles) {
        tile = work.at(local, group, begin, end);
        next_tile += stride;
        return true;
      }
      before += tiles;
      begin = end;
    }
    return false;
  }
};

}  // namespace guild
