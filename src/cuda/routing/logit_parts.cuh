// The router's product, split into parts, as later kernels read it.
#pragma once
#include "guild/router_logits.h"

namespace guild::cuda {

// Partial sums, (count, T, E) packed, which give the logits when added in order.
struct LogitParts {
  float const* data;
  int64_t stride;  // elements from one part to the next
  int count;

  // Elements i[0], i[1], ... Eight parts at a time are in flight before the first is added.
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
  // Elements i, i + 1, ..., as many as `there` up to four.
  __device__ void sum_of_neighbours(int64_t i, int there, float (&sum)[4]) const {
    constexpr int kAtOnce = 8;
    if (i % 4 != 0 || stride % 4 != 0 || reinterpret_cast<uintptr_t>(data) % 16 != 0) {
#pragma unroll 1
      for (int e = 0; e < min(there, 4); ++e) {
        float const found = this->sum(i + e);
#pragma unroll
        for (int to = 0; to < 4; ++to) sum[to] = to == e ? found : sum[to];
      }
      return;
    }
    if (there <= 0) return;
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      float4 value[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k < count) {
          value[k] = *reinterpret_cast<float4 const*>(data + (first + k) * stride + i);
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k >= count) break;
        bool const starts = first + k == 0;
        sum[0] = starts ? value[k].x : sum[0] + value[k].x;
        sum[1] = starts ? value[k].y : sum[1] + value[k].y;
        sum[2] = starts ? value[k].z : sum[2] + value[k].z;
        sum[3] = starts ? value[k].w : sum[3] + value[k].w;
      }
    }
  }
};

// torch.sigmoid(), bit for bit.
__device__ inline float sigmoid_of(float x) { return 1.f / (1.f + expf(-x)); }

// The product of a gate, and where its scores go, one a token; null: there is none.
struct GateParts {
  LogitParts parts;
  float* score = nullptr;

  __device__ void write(int64_t token) const { score[token] = sigmoid_of(parts.sum(token)); }
};
inline GateParts gate_parts(RouterLogits const& x, int count) {
  return {{static_cast<float const*>(x.gate_workspace), x.tokens, count},
          static_cast<float*>(x.gate_score)};
}

// A single token's experts, to be chosen by the kernel that needs them first.
struct TokenChoice {
  LogitParts parts;
  GateParts gate;
  Route route;     // ids and scores: written by the kernel that chooses
  int64_t blocks;  // of the product, each of which has a multiprocessor to itself
};

// Multiplies, and leaves the choice to another kernel.
TokenChoice choice_of(RouterLogits const& product, Route const& route, Queue const& queue);

// Multiplies into the workspace, or, where there is one part, into x.logits if these are given.
LogitParts multiply_for_router(RouterLogits const& x, Queue const& queue);

// The blocks that it launches where few_for_router().
int64_t blocks_of_few(RouterLogits const& x, Queue const& queue);

}  // namespace guild::cuda
