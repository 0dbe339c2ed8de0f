// The bias of the router's logits, to which the chunks of a sum are added.
#pragma once
#include "cuda/sm90/fragment.cuh"
#include "guild/router_logits.h"

namespace guild::cuda {

template <class T>
struct RouterBias {
  void const* data = nullptr;  // of T or float; null: none
  bool wide = false;           // of float
  int experts = 0;

  // Initial values of a fragment's sums, whose first column is first_expert: each expert's bias, or
  // 0 without one and in all parts but the first. Never -0, so that a logit of 0 has the same sign
  // whether or not its parts are summed separately.
  template <int count>
  __device__ void begin(float (&sum)[count], int first_expert, bool first_part) const {
    bool const adds = data != nullptr && first_part;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      int const expert = first_expert + 2 * i + fragment_column(threadIdx.x % 128);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float const value = adds && expert + column < experts ? at(expert + column) + 0.f : 0.f;
        sum[i + column] = sum[i + column + 2] = value;
      }
    }
  }

 private:
  __device__ float at(int expert) const {
    return wide ? static_cast<float const*>(data)[expert]
                : float(static_cast<T const*>(data)[expert]);
  }
};

template <class T>
RouterBias<T> router_bias(RouterLogits const& x) {
  return {x.bias, x.bias_dtype == DType::float32, int(x.experts)};
}

}  // namespace guild::cuda
