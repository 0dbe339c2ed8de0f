// Where a thread is in the ring of stages.
#pragma once
#include <cstdint>

namespace guild::cuda {

// Int: of before(). Signed, it takes more instructions, without which ptxas serialises the products
// (C7515) where results leave element by element.
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
