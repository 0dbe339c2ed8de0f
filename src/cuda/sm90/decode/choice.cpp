// When the products for few tokens are expected to be faster.
#include "cuda/alignment.h"
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/forced_config.h"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

// Measured on an H200 over the presets of `guild bench` and 1 to 256 tokens (docs/measured/): up to
// this many tokens they are faster, and up to this many rows an expert on average.
constexpr int64_t kFewTokens = 128, kFewRows = 10;

bool are_few(int64_t tokens, int64_t rows, int64_t experts) {
  if (forced_decode >= 0) return forced_decode == 1;
  return tokens <= kFewTokens || rows <= kFewRows * experts;
}

}  // namespace

bool serves_few_tokens(UpProduct const& x) {
  return x.groups.groups <= kMostRouted && are_few(x.tokens, x.rows, x.groups.groups);
}

bool serves_few_tokens(RowProduct const& x) {
  bool const able = x.halves == 1 && x.direct.data == nullptr && x.groups.ends != nullptr &&
                    x.groups.groups <= kMostRouted;
  return able && are_few(most_tokens(x), x.rows, x.groups.groups);
}

bool are_for_few_tokens(Sizes const& x) {
  return x.rows() > 0 && x.experts <= kMostRouted && are_few(x.tokens, x.rows(), x.experts);
}

bool products_sort(Sort const& x) {
  int64_t const slots = x.tokens * x.top_k;
  bool const plain = x.slots < 0 && (x.scores == nullptr || x.score_dtype == DType::float32);
  return plain && slots > 0 && slots <= kMostSlotsInBlock && x.experts <= kMostRouted &&
         are_few(x.tokens, slots, x.experts);
}

}  // namespace guild::cuda::sm90
