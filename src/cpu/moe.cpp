// The composites on the CPU: src/compose.h with this backend's steps.
#include "checks/check.h"
#include "compose.h"
#include "guild/cpu.h"

namespace guild::cpu {

namespace {

struct Steps {
  void sort_by_expert(Sort const& x) const { cpu::sort_by_expert(x); }
  void up_projection(UpProjection const& x) const { cpu::up_projection(x); }
  void down_projection(DownProjection const& x) const { cpu::down_projection(x); }
  void combine(Combine const& x) const { cpu::combine(x); }
  void down_and_combine(DownProjection const& down, Combine const& sum) const {
    down_projection(down);
    combine(sum);
  }
  void down_gradient(DownGradient const& x) const { cpu::down_gradient(x); }
  void score_gradient(ScoreGradient const& x) const { cpu::score_gradient(x); }
  void up_gradient(UpGradient const& x) const { cpu::up_gradient(x); }
  WeightSchedule schedule_weight_gradients(Sizes const&, Routing const&,
                                           WeightSchedule const&) const {
    return {};
  }
  void up_weight_gradient(UpWeightGradient const& x) const { cpu::up_weight_gradient(x); }
  void down_weight_gradient(DownWeightGradient const& x) const { cpu::down_weight_gradient(x); }
};

}  // namespace

void moe_forward(MoeForward const& x) {
  check(x);
  compose_forward(x, workspace_of(x), Steps{});
}

void moe_backward(MoeBackward const& x) {
  check(x);
  compose_backward(x, Steps{});
}

void moe_weight_gradients(MoeWeightGradients const& x) {
  check(x);
  compose_weight_gradients(x, {}, Steps{});
}

}  // namespace guild::cpu
