// The grouped products on compute capability 9.0: one translation unit each, which makes the tensor
// maps, takes a config and launches kernel.cuh.
#pragma once
#include "cuda/products.h"

namespace guild::cuda::sm90 {

void up_product(UpProduct const& product, Queue const& queue);
void down_gradient_product(DownGradientProduct const& product, Queue const& queue);
void row_product(RowProduct const& product, Queue const& queue);
// With a low-rank term.
void low_rank_up_product(UpProduct const& product, Queue const& queue);
void low_rank_down_gradient_product(DownGradientProduct const& product, Queue const& queue);
void low_rank_row_product(RowProduct const& product, Queue const& queue);  // not to `direct`
void expert_product(ExpertProduct const& product, Queue const& queue);
bool products_sort(Sort const& sort);
bool fuses_shared_experts(Sizes const& sizes);

}  // namespace guild::cuda::sm90
