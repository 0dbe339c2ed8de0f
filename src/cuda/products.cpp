// Forwards the grouped products to the kernels of the only supported architecture, compute
// capability 9.0. A second one would be selected here, by the current device.
#include "cuda/products.h"

#include "cuda/shared_expert.h"
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
bool fuses_shared_experts(Sizes const& sizes) { return sm90::fuses_shared_experts(sizes); }
bool token_sum(TokenSum const& product, Queue const& queue) {
  return sm90::token_sum(product, queue);
}

}  // namespace guild::cuda
