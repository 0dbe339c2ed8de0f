// The end of the down gradient's bias gradients: bias_sums.cu.
#pragma once
#include "compose.h"
#include "guild/cuda.h"

namespace guild::cuda {

// Adds up what the blocks of the down gradient left in `sums`.
void add_bias_sums(DownGradient const& x, BiasSums const& sums, Queue const& queue);

}  // namespace guild::cuda
