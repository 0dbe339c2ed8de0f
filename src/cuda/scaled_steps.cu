// scaled_up() and scaled_down_gradient(), which are not built for CUDA yet.
#include "check.h"
#include "cuda/device.h"
#include "guild/cuda.h"

namespace guild::cuda {

void scaled_up(ScaledUp const& x, Queue) {
  check(x);
  throw Error("scaled_up: not built for CUDA yet");
}

void scaled_down_gradient(ScaledDownGradient const& x, Queue) {
  check(x);
  throw Error("scaled_down_gradient: not built for CUDA yet");
}

}  // namespace guild::cuda
