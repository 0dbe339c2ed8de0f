// The last pass of the down gradient's bias gradients: bias_sums.cu.
#pragma once
#include "compose.h"
#include "guild/cuda.h"

namespace guild::cuda {

// Adds up the sums over chunks that the down gradient's kernel has written to `sums`.
void add_bias_sums(DownGradient const& x, BiasSums const& sums, Queue const& queue);

}  // namespace guild::cuda
