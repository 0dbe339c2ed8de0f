// Walks the output tiles of a ragged grouped GEMM. Pure index arithmetic: tested on the CPU.
//
// ends[e] is where group e ends along the ragged dimension and group e + 1 begins. Values are
// clamped to [previous end, total], so that no input makes a kernel leave its buffers.
#pragma once
#include <cstdint>

#include "shared/activation.h"

namespace guild {

struct Tile {
  int expert;
  int row, col;   // first row and column of the output tile
  int rows;       // valid rows, <= tile_m
  int inner;      // length of the sum over K
  int inner_row;  // ragged inner dimension: the first row of A and B to sum over
};

// How many pieces of `size` cover `length`.
GUILD_HD constexpr int64_t pieces(int64_t length, int64_t size) {
  return (length + size - 1) / size;
}

struct Groups {
  int32_t const* ends;  // (groups); null: every group has total / groups
  int groups, total;

  GUILD_HD int end(int group, int begin) const {
    if (ends == nullptr) return begin + total / groups;
    int const e = ends[group];
    return e < begin ? begin : (e > total ? total : e);
  }
};

// The order of the tiles of one matrix of down x across tiles: bands of `band` columns, rows by
// rows within a band. Blocks that run at the same time then share few rows of A and few columns of
// B, which stay in L2.
struct TilePlace {
  int row, col;
};
GUILD_HD TilePlace place_in_bands(int index, int down, int across, int band) {
  int const first = index / (down * band) * band;
  int const width = across - first < band ? across - first : band;
  int const local = index - first * down;
  return {local / width, first + local % width};
}

// Groups split the rows of D. Tiles of one expert are consecutive.
struct RowTiles {
  Groups groups;
  int tile_n, across, inner;  // across: tiles side by side
  int tile_m, band;           // kernel.cuh sets these and the next two
  int next_tile, stride;      // this block owns tiles next_tile, next_tile + stride, ...
  int expert = 0, begin = 0, tiles_before = 0;

  GUILD_HD bool next(Tile& tile) {
    for (; expert < groups.groups; ++expert) {
      int const end = groups.end(expert, begin);
      int const rows = end - begin;
      int const down = (rows + tile_m - 1) / tile_m, tiles = down * across;
      int const local = next_tile - tiles_before;
      if (local < tiles) {
        TilePlace const at = place_in_bands(local, down, across, band);
        int const row = at.row * tile_m, left = rows - row;
        tile = {expert, begin + row, at.col * tile_n, left < tile_m ? left : tile_m, inner, 0};
        next_tile += stride;
        return true;
      }
      tiles_before += tiles;
      begin = end;
    }
    return false;
  }
};

// Groups split the inner dimension; every expert has the same (rows x columns) output.
struct InnerTiles {
  Groups groups;
  int tile_n, rows, across;
  int tile_m, band;  // kernel.cuh sets these and the next two
  int next_tile, stride;
  int expert = 0, begin = 0;

  GUILD_HD bool next(Tile& tile) {
    int const down = (rows + tile_m - 1) / tile_m, per_expert = down * across;
    int const owner = next_tile / per_expert;
    if (owner >= groups.groups) return false;
    for (; expert < owner; ++expert) begin = groups.end(expert, begin);
    int const local = next_tile % per_expert;
    TilePlace const at = place_in_bands(local, down, across, band);
    int const row = at.row * tile_m;
    int const left = rows - row;
    tile = {expert,
            row,
            at.col * tile_n,
            left < tile_m ? left : tile_m,
            groups.end(expert, begin) - begin,
            begin};
    next_tile += stride;
    return true;
  }
};

}  // namespace guild
