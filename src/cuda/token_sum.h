// The down projection and combine of a single token in one kernel, for inference.
#pragma once
#include "cuda/shared_expert.h"

namespace guild::cuda {

// O = residual + sum over the slots of one token, in order, of score * (A[row of the slot] W[expert
// of the slot]^T + bias). With shared experts, the residual is their results, rounded.
struct TokenSum {
  DType dtype = DType::bfloat16;
  int64_t n = 0, k = 0;
  Sort sort;                       // of the token's slots; the up product before has run it
  ConstRows a;                     // (slots, k), by row of the sort; then a row of shared experts
  ConstWeight w;                   // (E, n, k)
  ConstRows bias;                  // (E, n); null data: none
  float const* score = nullptr;    // (slots); null: 1
  void const* residual = nullptr;  // (n); null: none
  float const* residual_scale = nullptr;  // (1), the product is rounded; null: 1
  void* o = nullptr;                      // (n)
  bool shared = false;                    // whether there are shared experts; no residual then
  ConstWeight shared_w = {};              // (1, n, k)
};
// False if no kernel serves it: nothing has been done then.
bool token_sum(TokenSum const& product, Queue const& queue);

// Both steps, as a TokenSum. shared: experts that ride along, or null. False if that cannot be:
// nothing has been done then.
bool down_with_sum(DownProjection const& down, Combine const& sum, Sort const& sort,
                   SharedExpert const* shared, Queue const& queue);

}  // namespace guild::cuda
