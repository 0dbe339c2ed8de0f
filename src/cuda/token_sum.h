// The down projection and combine of a single token in one kernel, for inference.
#pragma once
#include "guild/cuda.h"

namespace guild::cuda {

// O = residual + sum over the slots of one token, in order, of score * (A[row of the slot] W[expert
// of the slot]^T + bias).
struct TokenSum {
  DType dtype = DType::bfloat16;
  int64_t n = 0, k = 0;
  Sort sort;                       // of the token's slots; the up product before has run it
  ConstRows a;                     // (slots, k), by row of the sort
  ConstWeight w;                   // (E, n, k)
  ConstRows bias;                  // (E, n); null data: none
  float const* score = nullptr;    // (slots); null: 1
  void const* residual = nullptr;  // (n); null: none
  void* o = nullptr;               // (n)
};
// False if no kernel serves it: nothing has been done then.
bool token_sum(TokenSum const& product, Queue const& queue);

// Both steps, as a TokenSum. False if that cannot be: nothing has been done then.
bool down_with_sum(DownProjection const& down, Combine const& sum, Sort const& sort,
                   Queue const& queue);

}  // namespace guild::cuda
