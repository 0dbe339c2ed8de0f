// The tiles of the products for tens to hundreds of rows per expert (tall.cuh). Pure index
// arithmetic: tested on the CPU.
#pragma once
#include "shared/tiles.h"

namespace guild::cuda::sm90 {

// The most rows of X in a tile; in a narrow tile; and in a tile of a group that needs more than two
// tiles and so is bound by its products, which are fastest with this many rows.
inline constexpr int kTallRows = 152, kNarrowRows = 64, kFastRows = 128;

// Groups split the rows of D. A group's rows are divided evenly among as few row tiles as hold
// them: weights are read as rarely as possible, and no tile is nearly empty. Groups of many rows
// get broad tiles of twice as many columns, which halves the reads of X; others get narrow ones,
// which are more numerous and balance better over the blocks.
struct TallTiles {
  Groups groups;
  int tile_n, columns;  // tile_n: columns of a narrow tile
  int narrow_up_to;     // rows; at most kNarrowRows

  static constexpr bool kHasOrder = false;

  GUILD_HD bool is_broad(int rows) const { return rows > narrow_up_to; }

  GUILD_HD MatrixTiles matrix(int begin, int end) const {
    int const rows = end - begin, most = rows > 2 * kTallRows ? kFastRows : kTallRows;
    int const down = (rows + most - 1) / most;
    int const each = down <= 1 ? kTallRows : (rows + down - 1) / down;
    int const wide = is_broad(rows) ? 2 * tile_n : tile_n;
    return {.rows = rows,
            .across = (columns + wide - 1) / wide,
            .tile_m = (each + 7) / 8 * 8,
            .tail_m = 0,
            .band = 1,  // the tiles that share weights follow each other
            .tile_n = wide};
  }
  GUILD_HD Tile at(int index, int group, int begin, int end) const {
    Tile tile = matrix(begin, end).at(index);
    tile.expert = group;
    tile.row += begin;
    tile.apart = is_broad(end - begin);  // there are no clusters here
    return tile;
  }
};

}  // namespace guild::cuda::sm90
