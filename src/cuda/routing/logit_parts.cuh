// The router's product as the kernels that follow it take it.
#pragma once
#include "guild/router_logits.h"

namespace guild::cuda {

// What is to be added up, in order, to give the logits: (count, T, E), packed.
struct LogitParts {
  float const* data;
  int64_t stride;  // elements from one part to the next
  int count;

  // Elements i[0], i[1], ... Parts, eight at a time, are under way before the first is added.
  template <int elements>
  __device__ void sum_of(int64_t const (&i)[elements], float (&sum)[elements]) const {
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      float value[kAtOnce][elements];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int e = 0; e < elements; ++e) {
          if (first + k < count) value[k][e] = data[(first + k) * stride + i[e]];
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int e = 0; e < elements; ++e) {
          if (first + k < count) sum[e] = first + k == 0 ? value[k][e] : sum[e] + value[k][e];
        }
      }
    }
  }
  __device__ float sum(int64_t i) const {
    float sum[1] = {};
    sum_of({i}, sum);
    return sum[0];
  }
};

// Multiplies into the workspace, or, where there is one part, into x.logits if these are given.
LogitParts multiply_for_router(RouterLogits const& x, Queue const& queue);

}  // namespace guild::cuda
