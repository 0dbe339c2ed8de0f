// How the sums over an expert's rows are cut: into chunks of 64 rows, counted from its first one,
// whose sums a second pass adds up. Pure index arithmetic: tested on the CPU.
#pragma once
#include "shared/tiles.h"

namespace guild {

inline constexpr int kChunkRows = 64;

// Where the sums of the chunk from `row` on lie. No two experts' chunks meet: one that begins with
// a ragged end of the one before has a greater number.
GUILD_HD int chunk_of(int row, int expert) { return row / kChunkRows + expert; }

// The most chunks that rows and experts can make, holes between experts included.
GUILD_HD constexpr int64_t most_chunks(int64_t rows, int64_t experts) {
  return rows == 0 ? 0 : pieces(rows, kChunkRows) + experts;
}

}  // namespace guild
