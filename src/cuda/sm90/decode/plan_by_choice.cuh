// The plan for a single token, whose experts every block of the up projection chooses by itself
// from the router's product. That saves a launch, which would take longer than the redundant work.
#pragma once
#include <cstddef>

#include "cuda/arch/dependent_launch.cuh"
#include "cuda/routing/route_few.cuh"
#include "cuda/sm90/decode/plan.cuh"
#include "cuda/warp.cuh"

namespace guild::cuda::sm90 {

struct NoChoice {};

// Prefetches into L2 only, since earlier kernels may still be writing the biases.
__device__ inline void prefetch_biases(Route const& route) {
  auto const* const bias = static_cast<float const*>(route.selection_bias);
  int const first = 32 * int(threadIdx.x);
  if (bias == nullptr || first >= route.experts) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + first));
}

// Instruction caches are cold at each layer, and fetching instructions one by one takes longer than
// the choice itself. So a block that has to wait for the router's product rehearses: it executes
// the same instructions on made-up logits and discards the result.

// The choice of a token's experts and the plan made from it share memory. sort_in_warp() overwrites
// nothing that RouteOfToken::write() reads, so one warp can still write out the choice while others
// make their plans.
union ChoiceAndPlan {
  Planner planner;
  struct {
    Planner::OfWarp of_planner[kPlanWarps];
    RouteOfToken router;
  };
  static constexpr size_t kRead =  // end of what write() reads, at most
      kPlanWarps * sizeof(Planner::OfWarp) + alignof(RouteOfToken) + offsetof(RouteOfToken, order);
  static_assert(offsetof(Planner, row_of) >= kRead);
};

// Called by the whole block. Waits for the preceding kernel, except in a rehearsal. Warp 0 of the
// last block writes ids and scores before it lets the next kernel start, since that may read them
// before it waits; the block's other warps carry on meanwhile.
template <Ranking ranking>
__device__ inline Plan plan_by_choice(TokenChoice const& choice, Sort const& sort,
                                      ChoiceAndPlan& memory, bool rehearses) {
  RouteOfToken& router = memory.router;
  Route const& route = choice.route;
  int const experts = int(route.experts), top_k = int(route.top_k), lane = threadIdx.x % 32;
  bool const first = warp_index() == 0, writes = !rehearses && blockIdx.x + 1 == gridDim.x;
  if (!rehearses) wait_for_previous();
  if (!rehearses && !writes) let_next_start();
  bool const unbounded = router.find_keys<ranking>(route, choice.parts, 0, experts, rehearses);
  if (first) router.choose<ranking>(route.router, experts, top_k);
  __syncthreads();
  if (writes && first) {
    router.write<ranking, false>(route, 0, experts, unbounded);
    if (lane == 0 && choice.gate.score != nullptr) choice.gate.write(0);
    __threadfence();
    __syncwarp();
    let_next_start();
  }
  bool const there = lane < top_k && (rehearses || RouteOfToken::is_real(route, 0));
  return memory.planner.sort_in_warp(sort, there ? int(router.chosen[lane]) : Planner::kNoExpert);
}

}  // namespace guild::cuda::sm90
