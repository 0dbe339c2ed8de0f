// The router's kernels: from logits, and from a product in parts.
#include "cuda/routing/route.cuh"

#include <algorithm>

#include "checks/check.h"
#include "checks/router_logits.h"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/routing/route_few.cuh"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

// Up to this many tokens do not fill the GPU, and more lanes per token are faster.
constexpr int64_t kFewTokens = 4096;

// Up to this many tokens, a whole warp per token is faster still.
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
  route_token<Ranking::any>(x, deal, seat, row, /*keys=*/nullptr, chosen[seat.token_in_block]);
}

// Adds up the logits of some tokens, from element `first` of the product on, with the whole block,
// and writes their keys too unless `keys` is null. For more loads in flight, a thread adds up two
// elements together where there are enough.
__device__ void add_up_logits(Route const& x, LogitParts const& parts, int64_t first, int count,
                              int experts, float* logits, float* keys) {
  auto const* const bias = static_cast<float const*>(x.selection_bias);
  auto const bias_of = [&](int i) {
    return keys != nullptr && bias != nullptr ? bias[i % experts] : 0.f;
  };
  auto const put = [&](int i, float logit, float bias) {
    logits[i] = logit;
    if (keys != nullptr) keys[i] = plain_key(x, logit, bias);
  };
  int i = threadIdx.x;
#pragma unroll 1
  for (; i + kRouterThreads < count; i += 2 * kRouterThreads) {
    int const j = i + kRouterThreads;
    float const biases[] = {bias_of(i), bias_of(j)};
    float sum[2] = {};
    parts.sum_of({first + i, first + j}, sum);
    put(i, sum[0], biases[0]);
    put(j, sum[1], biases[1]);
  }
  if (i < count) {
    float const bias = bias_of(i);
    put(i, parts.sum(first + i), bias);
  }
}

// The same from a product in parts, which the whole block adds up first. A block has fewer tokens
// than it has room for, so that many blocks share the loads.
template <Ranking ranking, class S>
__global__ void __launch_bounds__(kRouterThreads, std::min(4, blocks_at_once(S::per_lane)))
route_parts_kernel(Route x, LogitParts parts, GateParts gate, int tokens_of_block, Deal deal) {
  __shared__ uint32_t chosen[S::tokens][S::experts];
  extern __shared__ __align__(16) float logits[];  // (tokens_of_block, E), followed by their keys
  let_next_start();
  Seat<S> seat;
  int64_t const first = int64_t(blockIdx.x) * tokens_of_block;
  int const tokens = int(min(int64_t(tokens_of_block), x.tokens - first));
  wait_for_previous();
  int const experts = deal.experts;
  float* const keys = has_plain_keys<ranking>(x) ? logits + tokens_of_block * experts : nullptr;
  add_up_logits(x, parts, first * experts, tokens * experts, experts, logits, keys);
  int const from_end = kRouterThreads - 1 - int(threadIdx.x);  // the last warp has time
  if (gate.score != nullptr && from_end < tokens) gate.write(first + from_end);
  __syncthreads();
  if (seat.token_in_block - int(threadIdx.x % 32) / S::lanes >= tokens) return;  // the whole warp
  seat.token = seat.token_in_block < tokens ? first + seat.token_in_block : x.tokens;
  int const row = min(seat.token_in_block, tokens - 1) * experts;
  route_token<ranking>(x, deal, seat, logits + row, keys == nullptr ? nullptr : keys + row,
                       chosen[seat.token_in_block]);
}

// One, or as many as leave two blocks for each multiprocessor and fit into shared memory, of which
// a token takes `bytes`.
template <class S>
int tokens_of_block(int64_t tokens, int64_t bytes, Queue const& queue) {
  constexpr int64_t kShared = 48 * 1024, kOwn = sizeof(uint32_t) * S::tokens * S::experts;
  int64_t const even = ceil_div(tokens, 2 * int64_t(multiprocessors(queue)));
  return int(std::min({even, int64_t(S::tokens), (kShared - kOwn) / bytes}));
}

template <Ranking ranking>
__global__ void __launch_bounds__(RouteOfToken::kThreads) route_few_kernel(Route x,
                                                                           LogitParts parts,
                                                                           int experts,
                                                                           GateParts gate) {
  __shared__ RouteOfToken smem;
  let_next_start();
  wait_for_previous();
  bool const unbounded = smem.find_keys<ranking>(x, parts, blockIdx.x, experts);
  if (threadIdx.x == RouteOfToken::kThreads - 1 && gate.score != nullptr) gate.write(blockIdx.x);
  if (threadIdx.x >= 32) return;
  smem.choose<ranking>(x.router, experts, int(x.top_k));
  smem.write<ranking, true>(x, blockIdx.x, experts, unbounded);
}

void route_few(Route const& x, LogitParts const& parts, GateParts const& gate, Queue const& queue) {
  with_ranking(x, [&]<Ranking ranking> {
    cuda_check(launch_kernel(route_few_kernel<ranking>,
                             {.blocks = unsigned(x.tokens),
                              .threads = RouteOfToken::kThreads,
                              .stream = queue.stream,
                              .early = true},
                             x, parts, int(x.experts), gate),
               "launch of route");
  });
}

void route_parts(Route const& x, LogitParts const& parts, GateParts const& gate,
                 Queue const& queue) {
  auto const run = [&](auto shape, Deal const& deal) {
    using S = decltype(shape);
    int64_t const bytes = (has_plain_keys(x) ? 2 : 1) * x.experts * int64_t(sizeof(float));
    int const tokens = tokens_of_block<S>(x.tokens, bytes, queue);
    Launch const launch{.blocks = unsigned(ceil_div(x.tokens, tokens)),
                        .threads = kRouterThreads,
                        .bytes = tokens * bytes,
                        .stream = queue.stream,
                        .early = true};
    with_ranking(x, [&]<Ranking ranking> {
      cuda_check(
          launch_kernel(route_parts_kernel<ranking, S>, launch, x, parts, gate, tokens, deal),
          "launch of route");
    });
  };
  bool const by_four = x.experts % 4 == 0;
  if (x.tokens <= kFewerTokens && x.top_k <= kMostAlike) {
    with_whole_warp(x.experts, x.router.groups, by_four, run);
  } else {
    with_shape(x.experts, x.router.groups, by_four, run);
  }
}

// The route as it is run after the product.
Route checked_pair(RouterLogits const& product, Route const& route) {
  check_pair(product, route);
  Route routed = route;
  routed.logits = {product.workspace};
  check(routed);
  return routed;
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

TokenChoice choice_of(RouterLogits const& product, Route const& route, Queue const& queue) {
  Route const routed = checked_pair(product, route);
  LogitParts const parts = multiply_for_router(product, queue);
  bool const gated = product.gate.data != nullptr;
  GateParts const gate = gated ? gate_parts(product, parts.count) : GateParts{};
  return {parts, gate, routed, blocks_of_few(product, queue)};
}

void route_tokens(RouterLogits const& product, Route const& x, Queue queue) {
  Route const routed = checked_pair(product, x);
  bool const few = few_for_router(product.tokens, product.hidden, product.experts);
  bool const in_parts = serves_few(routed) || router_chunks(product.hidden) > 1;
  bool const together = product.gate.data != nullptr && x.tokens > 0 && few && in_parts;
  RouterLogits own = product;
  if (product.gate.data != nullptr && !together) {
    router_logits(gate_of(product), queue);
    own.gate = {};
  }
  LogitParts const parts = multiply_for_router(own, queue);
  if (x.tokens == 0) return;
  GateParts const gate = together ? gate_parts(product, parts.count) : GateParts{};
  if (serves_few(routed)) return route_few(routed, parts, gate, queue);
  if (parts.count == 1) return route(routed, queue);
  route_parts(routed, parts, gate, queue);
}

}  // namespace guild::cuda
