// When the few-token kernels are expected to be faster than the general ones.
#include "cuda/alignment.h"
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/forced_config.h"
#include "cuda/sm90/products.h"

namespace guild::cuda::sm90 {
namespace {

// Measured on an H200 over the presets of `guild bench` and 1 to 4,096 tokens (docs/measured/).
// Up to this many rows per expert on average, these products are faster.
constexpr int64_t kFewRows = 28;
// Up to this many where experts are small: the other kernels have larger tiles and lose more time
// before and after them.
constexpr int64_t kMoreRows = 40, kSmallBytes = 32 << 20;

// Above this many tokens and up to this many rows per expert on average, tall tiles are at least as
// fast, even if all rows go to a few experts.
constexpr int64_t kTallTokens = 64, kTallRowsEach = 160;

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

bool are_tall(int64_t tokens, int64_t rows, int64_t experts) {
  if (forced_decode >= 0) return forced_decode == 2;
  return tokens > kTallTokens && rows <= kTallRowsEach * experts;
}

// Whether a block can hold the groups' bounds and weights are contiguous along k.
bool can_be_tall(Groups const& groups, ConstWeight const& w) {
  return groups.ends != nullptr && groups.groups <= kMostRouted && w.in_stride == 1;
}

}  // namespace

bool serves_tall(UpProduct const& x) {
  bool const able = can_be_tall(x.groups, x.w[0]) && x.h.data == nullptr && x.sort == nullptr &&
                    x.shared.n == 0 && (x.pairing != Pairing::halves || lie_evenly(x.w[0], x.w[1]));
  return able && are_tall(x.tokens, x.rows, x.groups.groups);
}

bool serves_tall(RowProduct const& x) {
  bool const able = can_be_tall(x.groups, x.w[0]) && x.halves == 1 && x.direct.data == nullptr &&
                    x.sort == nullptr && x.shared.k == 0;
  return able && are_tall(most_tokens(x), x.rows, x.groups.groups);
}

bool serves_few_tokens(UpProduct const& x) {
  bool const able = x.h.data == nullptr || x.h_rows < 0 || x.h_rows == x.rows;
  return able && x.groups.groups <= kMostRouted && are_few(x.rows, x.groups.groups, x.n, x.k);
}

bool serves_few_tokens(RowProduct const& x) {
  bool const able = x.halves == 1 && x.direct.data == nullptr && x.groups.ends != nullptr &&
                    x.groups.groups <= kMostRouted;
  return able && are_few(x.rows, x.groups.groups, x.n, x.k);
}

// Where the products are those for few tokens.
bool fuses_shared_experts(Sizes const& x) {
  return x.rows() > 0 && x.experts <= kMostRouted &&
         are_few(x.rows(), x.experts, x.hidden, x.intermediate);
}

bool products_sort(Sort const& x) {
  int64_t const slots = x.tokens * x.top_k;
  bool const plain =
      x.slots < 0 && x.room < 0 && (x.scores == nullptr || x.score_dtype == DType::float32);
  return plain && slots > 0 && slots <= kMostSlotsInBlock && x.experts <= kMostRouted &&
         are_few(slots, x.experts);
}

}  // namespace guild::cuda::sm90
