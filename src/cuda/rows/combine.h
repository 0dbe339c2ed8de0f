// The combine step within a forward.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda {

struct CombineAfter {
  // Whether the kernel before this one is a down projection for few tokens, which starts the next
  // kernel once the slots' rows are written. They are then read while it still runs.
  bool after_few = false;
  bool residual_too = false;  // whether the residual, too, is that kernel's
  // Whether nothing reads y or a after this step, and each row belongs to one slot of one token. L2
  // then forgets the rows of both in place of writing them to memory: only where can_discard().
  bool discards = false;
  ConstRows a = {};  // (R, I); null data: none
};
// Whether every row of a (R, I) and y (R, H), which are contiguous, is a whole number of lines.
bool can_discard(Sizes const& sizes, void const* a, void const* y);
void combine(Combine const& step, CombineAfter const& after, Queue const& queue);

}  // namespace guild::cuda
