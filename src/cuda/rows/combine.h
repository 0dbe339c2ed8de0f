// The combine step after products for few tokens.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda {

struct CombineAfter {
  // Whether the kernel before this one is a down projection for few tokens, which starts the next
  // kernel once the slots' rows are written. They are then read while it still runs.
  bool after_few = false;
  bool residual_too = false;  // whether the residual, too, is that kernel's
};
void combine(Combine const& step, CombineAfter const& after, Queue const& queue);

}  // namespace guild::cuda
