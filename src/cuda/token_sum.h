// The down projection and combine of one or a few tokens in one kernel, for inference.
#pragma once
#include "cuda/shared_expert.h"

namespace guild::cuda {

// O = residual + sum over a token's slots, in order, of score * (A[row of the slot] W[expert of the
// slot]^T + bias). With shared experts, the residual is their results, rounded.
struct TokenSum {
  DType dtype = DType::bfloat16;
  int64_t n = 0, k = 0;
  Sort sort;                     // of the tokens' slots; the up product before has run it
  ConstRows a;                   // (slots, k), by row of the sort; then a row of shared experts
  ConstWeight w;                 // (E, n, k)
  ConstRows bias;                // (E, n); null data: none
  float const* score = nullptr;  // (slots); null: 1
  ConstRows residual = {};       // (tokens, n); null data: none
  float const* residual_scale = nullptr;  // (tokens), the products are rounded; null: 1
  Rows o;                                 // (tokens, n)
  // Whether there are shared experts, of a single token; no residual then.
  bool shared = false;
  ConstWeight shared_w = {};  // (1, n, k)
};
// Returns false, with nothing done, if no kernel serves it.
bool token_sum(TokenSum const& product, Queue const& queue);

// Both steps as a TokenSum, once require_runnable() has accepted them. shared: experts to compute
// in the same launches, or null. Returns false, with nothing done, if that is not possible.
bool down_with_sum(DownProjection const& down, Combine const& sum, Sort const& sort,
                   SharedExpert const* shared, Queue const& queue);

}  // namespace guild::cuda
