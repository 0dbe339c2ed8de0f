// The checks of chunks and their products. See check.h.
#pragma once
#include "guild/float8_chunks.h"

namespace guild {

void check(QuantizeChunks const& x);
void check(ChunkProduct const& x);

}  // namespace guild
