// The tiles of the products for tens to hundreds of rows per expert (tall.cuh). Pure index
// arithmetic: tested on the CPU.
#pragma once
#include "shared/tiles.h"

namespace guild::cuda::sm90 {

// Most rows of X of a tile; of a narrow one; and of a tile where a group takes more than two, and
// so is bound by its products, which are fastest with this many.
inline constexpr int kTallRows = 152, kNarrowRows = 64, kFastRows = 128;

// Groups split the rows of D. A group's rows are shared evenly by as few rows of tiles as hold
// them, so that weights are read as rarely as possible and no tile is left with a few rows. Groups
// of many rows have broad tiles, of twice as many columns, which read rows of X half as often;
// others have narrow ones, of which there are more to share among the blocks.
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
