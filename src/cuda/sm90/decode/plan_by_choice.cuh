// The plan of a single token whose experts every block of the up projection chooses for itself,
// from the router's product. That saves a launch, which would take longer than the repeated choice.
#pragma once
#include <type_traits>

#include "cuda/routing/route_few.cuh"
#include "cuda/sm90/arch/dependence.cuh"
#include "cuda/sm90/decode/plan.cuh"
#include "cuda/warp.cuh"

namespace guild::cuda::sm90 {

struct NoChoice {};

// Only into L2: earlier kernels may still be writing them.
__device__ inline void prefetch_biases(Route const& route) {
  auto const* const bias = static_cast<float const*>(route.selection_bias);
  int const first = 32 * int(threadIdx.x);
  if (bias == nullptr || first >= route.experts) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + first));
}

// Called by the whole block. Waits for the previous kernel. The last block writes ids and scores
// before it lets the next kernel start, which may read them before it waits. `router` and `planner`
// may share memory.
__device__ inline Plan plan_by_choice(TokenChoice const& choice, Sort const& sort,
                                      RouteOfToken& router, Planner& planner) {
  Route const& route = choice.route;
  int const experts = int(route.experts), top_k = int(route.top_k), lane = threadIdx.x % 32;
  bool const writes = blockIdx.x + 1 == gridDim.x, first = warp_index() == 0;
  prefetch_biases(route);
  wait_for_previous();
  if (!writes) let_next_start();
  bool const nan = router.find_keys(route, choice.parts, 0, experts);
  if (first) router.choose(route.router, experts, top_k);
  if (writes && first) {
    router.write(route, 0, experts, nan);
    if (lane == 0 && choice.gate.score != nullptr) choice.gate.write(0);
    __threadfence();
    __syncwarp();
    let_next_start();
  }
  __syncthreads();
  bool const there = lane < top_k && RouteOfToken::is_real(route, 0);
  int const mine = there ? int(router.chosen[lane]) : Planner::kNoExpert;
  __syncthreads();
  return planner.sort_in_warp(sort, mine);
}

}  // namespace guild::cuda::sm90
