// Chunks of rows for the bias gradients: 64 rows each, counted from an expert's first row. One pass
// sums each chunk, a second one adds up the chunks. Pure index arithmetic: tested on the CPU.
#pragma once
#include "shared/tiles.h"

namespace guild {

inline constexpr int kBiasChunkRows = 64;

// The number of the chunk that begins at `row`. Adding the expert keeps numbers distinct: the last
// chunk of one expert and the first of the next may have the same row / 64.
GUILD_HD int bias_chunk_of(int row, int expert) { return row / kBiasChunkRows + expert; }

// An upper bound on chunk numbers; some are unused where an expert ends.
GUILD_HD constexpr int64_t most_bias_chunks(int64_t rows, int64_t experts) {
  return rows == 0 ? 0 : ceil_div(rows, kBiasChunkRows) + experts;
}

}  // namespace guild
