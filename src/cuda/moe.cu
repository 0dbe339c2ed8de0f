// The composites on the GPU: the steps of src/compose.h on one stream.
#include <optional>

#include "checks/check.h"
#include "compose.h"
#include "cuda/alignment.h"
#include "cuda/column_parts.h"
#include "cuda/device.h"
#include "cuda/gate_up.h"
#include "cuda/products.h"
#include "cuda/require_runnable.h"
#include "cuda/routing/route_few.cuh"
#include "cuda/rows/combine.h"
#include "cuda/shared_expert.h"
#include "cuda/token_sum.h"
#include "guild/cuda.h"

namespace guild::cuda {
namespace {

// Shared experts in a layer's launches.
struct FusedSharedExpert {
  SharedExpert const* expert = nullptr;  // null: none
  void* a = nullptr;                     // (T, W), their activations
  GateUpView<ConstWeight> up = {};

  SharedUp of_up() const {
    if (expert == nullptr) return {};
    return {.n = expert->intermediate, .w = {up.w[0], up.w[1]}, .activated = {a}};
  }
  SharedRows of_down() const {
    if (expert == nullptr) return {};
    return {.k = expert->intermediate, .w = expert->w_down, .a = {a}, .d = {expert->o}};
  }
};

struct Steps {
  Queue queue;
  InForward forward = {};  // its sort and choice are left to the products
  FusedSharedExpert shared = {};
  int64_t parts = 1;  // of the down projection
  void sort_by_expert(Sort const& x) const {
    if (forward.sort == nullptr) cuda::sort_by_expert(x, queue);
  }
  void up_projection(UpProjection const& x) const {
    cuda::up_projection(x, forward, shared.of_up(), queue);
  }
  void down_projection(DownProjection const& x) const {
    cuda::down_projection(x, forward, shared.of_down(), queue);
  }
  void combine(Combine const& x) const { cuda::combine(x, {}, queue); }
  void down_and_combine(DownProjection const& down, Combine const& sum) const {
    Sort const* const sort = forward.sort;
    if (sort != nullptr && down_with_sum(down, sum, *sort, shared.expert, queue)) return;
    for (int64_t i = 0; i < parts; ++i) {
      ColumnRange const part = columns_of_part(down.sizes.hidden, i, parts);
      down_projection(of_columns(down, part));
      cuda::combine(of_columns(sum, part),
                    {.after_few = sort != nullptr,
                     .residual_too = shared.expert != nullptr,
                     .discards = forward.short_lived,
                     .a = i + 1 == parts ? down.a : ConstRows{}},
                    queue);
    }
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

// Calls require_runnable() in place of the steps.
struct Requirements {
  void sort_by_expert(Sort const& x) const { require_runnable(x); }
  void up_projection(UpProjection const& x) const { require_runnable(x); }
  void down_projection(DownProjection const& x) const { require_runnable(x); }
  void down_and_combine(DownProjection const& down, Combine const& sum) const {
    require_runnable(down);
    require_runnable(sum);
  }
  void down_gradient(DownGradient const& x) const { require_runnable(x); }
  void score_gradient(ScoreGradient const& x) const { require_runnable(x); }
  void up_gradient(UpGradient const& x) const { require_runnable(x); }
  void combine(Combine const& x) const { require_runnable(x); }
  WeightSchedule schedule_weight_gradients(Sizes const&, Routing const&,
                                           WeightSchedule const&) const {
    return {};
  }
  void up_weight_gradient(UpWeightGradient const& x) const { require_runnable(x); }
  void down_weight_gradient(DownWeightGradient const& x) const { require_runnable(x); }
};

bool sorts_in_products(MoeForward const& x) { return x.sort != nullptr && products_sort(*x.sort); }

FusedSharedExpert fused(SharedExpert const& shared, MoeForward const& x, void* a) {
  Sizes own = x.sizes;
  own.intermediate = shared.intermediate;
  FusedSharedExpert const made{&shared, a,
                               gate_up_view(shared.w_up, own, x.activation.gated, x.order,
                                            element_bytes(x.dtype), "shared.w_up")};
  for (ConstWeight const& part : made.up.w) require_aligned(part, "shared.w_up");
  require_aligned(shared.w_down, "shared.w_down");
  return made;
}

// A forward whose steps can all run.
struct Forward {
  MoeForward x;
  ForwardWorkspace workspace;
  FusedSharedExpert shared;

  Forward(MoeForward const& layer, SharedExpert const* expert) : x(layer) {
    if (expert != nullptr) x.residual = {expert->o, 0};
    check(x);
    Carver carver(x.workspace);
    workspace =
        carve_forward(carver, x.sizes, x.dtype, expert == nullptr ? 0 : expert->intermediate);
    if (expert != nullptr) shared = fused(*expert, x, workspace.shared_a);
    compose_forward(x, workspace, Requirements{});
  }

  void run(TokenChoice const* choice, Queue queue) const {
    Counters counters{workspace.counters, kForwardCounters};
    queue.counters = &counters;
    InForward forward{.sort = sorts_in_products(x) ? x.sort : nullptr, .choice = choice};
    int64_t const most = forward.sort == nullptr ? parts(queue) : 1;
    forward.short_lived = fits_l2(most);
    compose_forward(x, workspace,
                    Steps{.queue = queue,
                          .forward = forward,
                          .shared = shared,
                          .parts = forward.short_lived ? most : 1});
  }

 private:
  // Parts by columns, where a tall product serves the down projection. Each may start early: the
  // combine before it waits for all other kernels before it lets the next one start.
  int64_t parts(Queue const& queue) const {
    if (shared.expert != nullptr || x.w_down.in_stride != 1) return 1;
    return column_parts(x.sizes, x.dtype, multiprocessors(queue));
  }

  // Whether A and Y need never be written to memory: L2 has room for both until they are added up,
  // and each row belongs to one slot of one token, as the sort is the layer's own. Little data
  // stays there anyway.
  bool fits_l2(int64_t parts) const {
    constexpr int64_t kLeastBytes = 2 << 20;
    Routing const& routing = x.routing;
    if (x.sort == nullptr || routing.slot_row == nullptr || routing.token_offsets != nullptr) {
      return false;
    }
    Sizes const& s = x.sizes;
    int64_t const columns = s.intermediate + most_columns_of_part(s.hidden, parts);
    int64_t const row_bytes = columns * element_bytes(x.dtype);
    return s.rows() >= kLeastBytes / row_bytes && s.rows() <= l2_bytes() / row_bytes &&
           can_discard(s, workspace.a, workspace.y);
  }
};

// Whether the up product chooses the experts of its token.
bool chooses_in_product(LayerRouter const& router, MoeForward const& layer) {
  RouterLogits const& x = router.product;
  return x.tokens == 1 && router.route.slopes == nullptr &&
         few_for_router(x.tokens, x.hidden, x.experts) && sorts_in_products(layer) &&
         fits_route_of_token(router.route);
}

}  // namespace

void moe_forward(MoeForward const& x, Queue queue) { Forward(x, nullptr).run(nullptr, queue); }

void moe_forward(MoeForward const& x, SharedExpert const& shared, Queue queue) {
  Forward(x, &shared).run(nullptr, queue);
}

void moe_forward(MoeForward const& layer, LayerRouter const& router, SharedExpert const* shared,
                 Queue queue) {
  Forward const forward(layer, shared);
  std::optional<TokenChoice> choice;
  if (chooses_in_product(router, layer)) {
    choice = choice_of(router.product, router.route, queue);
  } else {
    route_tokens(router.product, router.route, queue);
  }
  forward.run(choice ? &*choice : nullptr, queue);
}

int64_t moe_forward_workspace_bytes(Sizes const& sizes, DType dtype, int64_t shared) {
  Carver carver(nullptr);
  carve_forward(carver, sizes, dtype, shared);
  return carver.used();
}

void moe_backward(MoeBackward const& x, Queue queue) {
  check(x);
  require_aligned(x.dx, "dx");
  compose_backward(x, Requirements{});
  Counters counters{workspace_of(x).memory.counters, kBackwardCounters};
  queue.counters = &counters;
  compose_backward(x, Steps{queue});
}

void require_runnable(MoeWeightGradients const& x) {
  check(x);
  compose_weight_gradients(x, {}, Requirements{});
}

void moe_weight_gradients(MoeWeightGradients const& x, Queue queue) {
  require_runnable(x);
  ScheduleMemory const memory = workspace_of(x);
  Counters counters{memory.counters, kBackwardCounters};
  queue.counters = &counters;
  compose_weight_gradients(x, memory.schedule, Steps{queue});
}

}  // namespace guild::cuda
