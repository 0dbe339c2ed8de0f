// When the products for few tokens are expected to be faster.
#include "cuda/alignment.h"
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/forced_config.h"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

// Measured on an H200 over the presets of `guild bench` and 1 to 4,096 tokens (docs/measured/).
// Up to so many rows an expert on average they are faster.
constexpr int64_t kFewRows = 28;
// Up to so many where experts are small: the other kernels' tiles are larger, and so is what they
// lose around them.
constexpr int64_t kMoreRows = 40, kSmallBytes = 32 << 20;

// Whatever the size of the experts.
bool are_few(int64_t rows, int64_t experts) {
  return forced_decode >= 0 ? forced_decode == 1 : rows <= kFewRows * experts;
}

// n, k: of the up projection's one half, or of the down projection, which have as many weights.
bool are_few(int64_t rows, int64_t experts, int64_t n, int64_t k) {
  if (are_few(rows, experts)) return true;
  int64_t const bytes = 3 * n * k * kElementBytes;  // of an expert
  return forced_decode < 0 && rows <= kMoreRows * experts && bytes <= kSmallBytes;
}

}  // namespace

bool serves_few_tokens(UpProduct const& x) {
  return x.groups.groups <= kMostRouted && are_few(x.rows, x.groups.groups, x.n, x.k);
}

bool serves_few_tokens(RowProduct const& x) {
  bool const able = x.halves == 1 && x.direct.data == nullptr && x.groups.ends != nullptr &&
                    x.groups.groups <= kMostRouted;
  return able && are_few(x.rows, x.groups.groups, x.n, x.k);
}

bool are_for_few_tokens(Sizes const& x) {
  return x.rows() > 0 && x.experts <= kMostRouted &&
         are_few(x.rows(), x.experts, x.hidden, x.intermediate);
}

bool products_sort(Sort const& x) {
  int64_t const slots = x.tokens * x.top_k;
  bool const plain = x.slots < 0 && (x.scores == nullptr || x.score_dtype == DType::float32);
  return plain && slots > 0 && slots <= kMostSlotsInBlock && x.experts <= kMostRouted &&
         are_few(slots, x.experts);
}

}  // namespace guild::cuda::sm90
