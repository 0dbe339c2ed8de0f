// The router's product as the kernels that follow it take it.
#pragma once
#include "guild/router_logits.h"

namespace guild::cuda {

// What is to be added up, in order, to give the logits: (count, T, E), packed.
struct LogitParts {
  float const* data;
  int64_t stride;  // elements from one part to the next
  int count;

  // All parts, eight at a time, are under way before the first is added.
  __device__ float sum(int64_t i) const {
    constexpr int kAtOnce = 8;
    float sum = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      float value[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k < count) value[k] = data[(first + k) * stride + i];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k < count) sum = first + k == 0 ? value[k] : sum + value[k];
      }
    }
    return sum;
  }
};

// Multiplies into the workspace, or, where there is one part, into x.logits if these are given.
LogitParts multiply_for_router(RouterLogits const& x, Queue const& queue);

}  // namespace guild::cuda
