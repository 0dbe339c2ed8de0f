// The router of very few tokens, product and choice in one launch.
#pragma once
#include "guild/router_logits.h"

namespace guild::cuda {

// Checks that the product's arguments are what the GPU takes; logits may be null.
void check_on_gpu(RouterLogits const& product);

// Routes, and returns true, where one cluster of blocks is expected to be faster than a product
// over the whole GPU with a second launch behind it. Arguments are checked already, but for the
// product's.
bool route_few(RouterLogits const& product, Route const& route, Queue const& queue);

}  // namespace guild::cuda
