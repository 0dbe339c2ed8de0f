// Products for few tokens, bound by reading weights (product.cuh). up_product() and row_product()
// call them where they are expected to be faster than sm90/kernel.cuh; results are bitwise equal.
#pragma once
#include "cuda/products.h"
#include "cuda/token_sum.h"

namespace guild::cuda::sm90 {

// Up to this many slots, every block sorts them for itself.
inline constexpr int kMostSlotsInBlock = 128;

// Whether one tensor map can have gate and up as two parts.
inline bool lie_evenly(ConstWeight const& gate, ConstWeight const& up) {
  constexpr int64_t most = int64_t(1) << 39;  // bytes that a map's stride can have, or less
  int64_t const apart = static_cast<char const*>(up.data) - static_cast<char const*>(gate.data);
  return apart > 0 && apart < most && gate.out_stride == up.out_stride &&
         gate.expert_stride == up.expert_stride && gate.in_stride == up.in_stride &&
         gate.expert_at == nullptr && up.expert_at == nullptr;
}

bool serves_few_tokens(UpProduct const& product);
void decode_up_product(UpProduct const& product, Queue const& queue);

// The same in tall tiles (tall.cuh): tens to hundreds of rows per expert.
bool serves_tall(UpProduct const& product);
void tall_up_product(UpProduct const& product, Queue const& queue);
bool serves_tall(RowProduct const& product);
void tall_row_product(RowProduct const& product, Queue const& queue);

// Whether its activation is what StaticActivation::swiglu stands for.
bool is_swiglu(UpProduct const& product);

// No group is expected to have more rows.
inline int64_t most_tokens(RowProduct const& x) { return x.tokens >= 0 ? x.tokens : x.rows; }

bool serves_few_tokens(RowProduct const& product);
void decode_row_product(RowProduct const& product, Queue const& queue);

bool token_sum(TokenSum const& product, Queue const& queue);

}  // namespace guild::cuda::sm90
