// The router's product as the kernels that follow it take it.
#pragma once
#include "guild/router_logits.h"

namespace guild::cuda {

// What is to be added up, in order, to give the logits: (count, T, E), packed.
struct LogitParts {
  float const* data;
  int64_t stride;  // elements from one part to the next
  int count;

  __device__ float sum(int64_t i) const {
    float const* from = data + i;
    float sum = *from;
#pragma unroll 8
    for (int part = 1; part < count; ++part) sum += *(from += stride);
    return sum;
  }
};

// Multiplies into the workspace, or, where there is one part, into x.logits if these are given.
LogitParts multiply_for_router(RouterLogits const& x, Queue const& queue);

}  // namespace guild::cuda
