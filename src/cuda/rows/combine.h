// The combine step after products for few tokens.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda {

// after_few: whether the kernel before this one is a down projection for few tokens, which starts
// the next kernel once the slots' rows are written. They are then read while it still runs.
void combine(Combine const& step, bool after_few, Queue const& queue);

}  // namespace guild::cuda
