// The composites on the GPU: the steps of src/compose.h on one stream.
#include "check.h"
#include "compose.h"
#include "cuda/alignment.h"
#include "guild/cuda.h"

namespace guild::cuda {
namespace {

struct Steps {
  Queue queue;
  void up_projection(UpProjection const& x) const { cuda::up_projection(x, queue); }
  void down_projection(DownProjection const& x) const { cuda::down_projection(x, queue); }
  void combine(Combine const& x) const { cuda::combine(x, queue); }
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
  compose_forward(x, Steps{queue});
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
