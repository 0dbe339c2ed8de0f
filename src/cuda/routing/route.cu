// The router's kernels: from logits, and from a product in parts.
#include "cuda/routing/route.cuh"

#include <algorithm>

#include "check.h"
#include "check_router_logits.h"
#include "cuda/routing/logit_parts.cuh"
#include "cuda/sm90/arch/dependence.cuh"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

// Up to this many tokens do not fill the GPU, and more lanes per token are faster.
constexpr int64_t kFewTokens = 4096;

// Up to this many, a whole warp per token is.
constexpr int64_t kFewerTokens = 1024;

// Blocks per multiprocessor: as many as registers allow.
constexpr int blocks_at_once(int per_lane) {
  return per_lane <= 4 ? 6 : per_lane <= 8 ? 5 : per_lane <= 16 ? 3 : 1;
}

template <class S>
__global__ void __launch_bounds__(kRouterThreads, blocks_at_once(S::per_lane)) route_kernel(
    Route x, int64_t stride, Deal deal) {
  __shared__ uint32_t chosen[S::tokens][S::experts];
  let_next_start();
  Seat<S> const seat;
  if (seat.token - threadIdx.x % 32 / S::lanes >= x.tokens) return;  // the whole warp
  float const* const row =
      static_cast<float const*>(x.logits.data) + min(seat.token, x.tokens - 1) * stride;
  route_token(x, deal, seat, row, chosen[seat.token_in_block]);
}

// The same from a product in parts, which the whole block adds up first. Fewer tokens than a block
// has room for, so that many blocks share the loads.
template <class S>
__global__ void __launch_bounds__(kRouterThreads, blocks_at_once(S::per_lane)) route_parts_kernel(
    Route x, LogitParts parts, int tokens_of_block, Deal deal) {
  __shared__ uint32_t chosen[S::tokens][S::experts];
  extern __shared__ __align__(16) float logits[];  // (tokens_of_block, E)
  let_next_start();
  Seat<S> seat;
  int64_t const first = int64_t(blockIdx.x) * tokens_of_block;
  int const tokens = int(min(int64_t(tokens_of_block), x.tokens - first));
  wait_for_previous();
  for (int i = threadIdx.x; i < tokens * deal.experts; i += kRouterThreads) {
    logits[i] = parts.sum(first * deal.experts + i);
  }
  __syncthreads();
  if (seat.token_in_block - int(threadIdx.x % 32) / S::lanes >= tokens) return;  // the whole warp
  seat.token = seat.token_in_block < tokens ? first + seat.token_in_block : x.tokens;
  float const* const row = logits + min(seat.token_in_block, tokens - 1) * deal.experts;
  route_token(x, deal, seat, row, chosen[seat.token_in_block]);
}

// As many blocks as there are tokens, up to two for each multiprocessor.
int tokens_of_block(int64_t tokens, int most, Queue const& queue) {
  int64_t const even = ceil_div(tokens, 2 * int64_t(multiprocessors(queue)));
  return int(std::min<int64_t>(even, most));
}

void route_parts(Route const& x, LogitParts const& parts, Queue const& queue) {
  auto const launch = [&](auto shape, Deal const& deal) {
    using S = decltype(shape);
    int const tokens = tokens_of_block(x.tokens, S::tokens, queue);
    int64_t const bytes = tokens * x.experts * int64_t(sizeof(float));
    cuda_check(launch_early(route_parts_kernel<S>, dim3(unsigned(ceil_div(x.tokens, tokens))),
                            kRouterThreads, bytes, queue.stream, x, parts, tokens, deal),
               "launch of route");
  };
  bool const by_four = x.experts % 4 == 0;
  if (x.tokens <= kFewerTokens && x.top_k <= kMostAlike) {
    with_whole_warp(x.experts, x.router.groups, by_four, launch);
  } else {
    with_shape(x.experts, x.router.groups, by_four, launch);
  }
}

}  // namespace

void route(Route const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  if (x.tokens == 0) return;
  int64_t const stride = row_stride(x.logits, x.experts);
  auto const launch = [&](auto shape, Deal const& deal) {
    using S = decltype(shape);
    route_kernel<S>
        <<<router_blocks<S>(x.tokens), kRouterThreads, 0, queue.stream>>>(x, stride, deal);
  };
  bool const aligned = by_four(x.logits, stride);
  if (x.tokens > kFewTokens && x.top_k <= kMostAlike) {
    with_shape<TokenShape<8, 16>>(x.experts, x.router.groups, aligned, launch);
  } else {
    with_shape(x.experts, x.router.groups, aligned, launch);
  }
  cuda_check(cudaGetLastError(), "launch of route");
}

void route_tokens(RouterLogits const& product, Route const& x, Queue queue) {
  check_pair(product, x);
  Route routed = x;
  routed.logits = {product.workspace};
  check(routed);
  LogitParts const parts = multiply_for_router(product, queue);
  if (parts.count == 1) return route(routed, queue);
  if (x.tokens > 0) route_parts(routed, parts, queue);
}

}  // namespace guild::cuda
