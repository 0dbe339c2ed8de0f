// The combine step within a forward.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda {

struct CombineAfter {
  // Whether the preceding kernel is a down projection for few tokens, which lets the next kernel
  // start once the slots' rows are written. These are then read while it still runs.
  bool after_few = false;
  bool residual_too = false;  // whether the residual, too, is that kernel's
  // Whether nothing reads y or a after this step, and each row belongs to one slot of one token. L2
  // then discards their rows instead of writing them back. Only where can_discard().
  bool discards = false;
  ConstRows a = {};  // (R, I); null data: none
};
// Whether every row of a (R, I) and y (R, H), which are contiguous, is a whole number of lines.
bool can_discard(Sizes const& sizes, void const* a, void const* y);
void combine(Combine const& step, CombineAfter const& after, Queue const& queue);

}  // namespace guild::cuda
