// The product of chunks on compute capability 9.0.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda::sm90 {

// Operands begin on 16-byte boundaries, and so do slots.
void chunk_product(ChunkProduct const& product, Queue const& queue);

}  // namespace guild::cuda::sm90
