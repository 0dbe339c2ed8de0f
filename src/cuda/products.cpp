// Which architecture's kernels serve the grouped products: those of sm90/, on all that supports()
// admits. A second architecture is chosen here, by the current device.
#include "cuda/products.h"

#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/products.h"

namespace guild::cuda {

void up_product(UpProduct const& product, Queue const& queue) {
  if (product.low_rank.rank > 0) return sm90::low_rank_up_product(product, queue);
  sm90::up_product(product, queue);
}
void down_gradient_product(DownGradientProduct const& product, Queue const& queue) {
  if (product.low_rank.rank > 0) return sm90::low_rank_down_gradient_product(product, queue);
  sm90::down_gradient_product(product, queue);
}
void row_product(RowProduct const& product, Queue const& queue) {
  if (product.low_rank.rank > 0) return sm90::low_rank_row_product(product, queue);
  sm90::row_product(product, queue);
}
void expert_product(ExpertProduct const& product, Queue const& queue) {
  sm90::expert_product(product, queue);
}

bool products_sort(Sort const& sort) { return sm90::products_sort(sort); }
bool are_for_few_tokens(Sizes const& sizes) { return sm90::are_for_few_tokens(sizes); }
bool token_sum(TokenSum const& product, Queue const& queue) {
  return sm90::token_sum(product, queue);
}

}  // namespace guild::cuda
