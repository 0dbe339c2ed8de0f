// The composites on the GPU: the steps of src/compose.h on one stream.
#include "check.h"
#include "compose.h"
#include "cuda/alignment.h"
#include "cuda/products.h"
#include "cuda/rows/combine.h"
#include "cuda/token_sum.h"
#include "guild/cuda.h"

namespace guild::cuda {
namespace {

struct Steps {
  Queue queue;
  Sort const* sort = nullptr;  // left to the products
  void sort_by_expert(Sort const& x) const {
    if (sort == nullptr) cuda::sort_by_expert(x, queue);
  }
  void up_projection(UpProjection const& x) const { cuda::up_projection(x, sort, queue); }
  void down_projection(DownProjection const& x) const { cuda::down_projection(x, sort, queue); }
  void combine(Combine const& x) const { cuda::combine(x, sort != nullptr, queue); }
  void down_and_combine(DownProjection const& down, Combine const& sum) const {
    if (sort != nullptr && down_with_sum(down, sum, *sort, queue)) return;
    down_projection(down);
    combine(sum);
  }
  void down_gradient(DownGradient const& x) const { cuda::down_gradient(x, queue); }
  void score_gradient(ScoreGradient const& x) const { cuda::score_gradient(x, queue); }
  void up_gradient(UpGradient const& x) const { cuda::up_gradient(x, queue); }
  WeightSchedule schedule_weight_gradients(Sizes const& sizes, Routing const& routing,
                                           WeightSchedule const& schedule) const {
    if (sizes.experts > kMostRouted) return {};
    cuda::schedule_weight_gradients(sizes, routing, schedule, queue);
    return schedule;
  }
  void up_weight_gradient(UpWeightGradient const& x) const { cuda::up_weight_gradient(x, queue); }
  void down_weight_gradient(DownWeightGradient const& x) const {
    cuda::down_weight_gradient(x, queue);
  }
};

}  // namespace

void moe_forward(MoeForward const& x, Queue queue) {
  check(x);
  queue.counter = workspace_of(x).counter;
  bool const in_products = x.sort != nullptr && products_sort(*x.sort);
  compose_forward(x, Steps{queue, in_products ? x.sort : nullptr});
}

void moe_backward(MoeBackward const& x, Queue queue) {
  check(x);
  queue.counter = workspace_of(x).memory.counter;
  compose_backward(x, Steps{queue});
}

void moe_weight_gradients(MoeWeightGradients const& x, Queue queue) {
  check(x);
  ScheduleMemory const memory = workspace_of(x);
  queue.counter = memory.counter;
  compose_weight_gradients(x, memory.schedule, Steps{queue});
}

}  // namespace guild::cuda
