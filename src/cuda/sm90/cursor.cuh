// A thread's position in the ring of stages.
#pragma once
#include <cstdint>

namespace guild::cuda {

// Int: the type that before() computes in. unsigned takes fewer instructions, but makes ptxas
// serialise the wgmma (C7515) of kernels that store element by element; these use int.
template <int stages, class Int>
struct Cursor {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ int before(int count) const { return Int(stage + stages - count) % stages; }
  __device__ void advance(int count) {
    int const end = stage + count;
    stage = end % stages;
    phase ^= end / stages & 1;
  }
};

}  // namespace guild::cuda
