// The router of few tokens: product and choice by one cluster of blocks.
//
// The blocks share the product's tiles, each of one chunk, and leave their sums in shared memory.
// Then each warp of each block has a token: the block adds its tokens' chunks, which it reads from
// the blocks that have them, and the warp chooses. That saves the launch of a second kernel and the
// way of the chunks through memory.
#include "cuda/routing/few.h"

#include "cuda/routing/one_cluster.cuh"
#include "cuda/routing/product.cuh"
#include "cuda/routing/route.cuh"
#include "cuda/shared_memory.h"

namespace guild::cuda {
namespace {

constexpr int kBlocks = kMostClusterBlocks;
constexpr int kTokens = 4;  // of a block
constexpr int kRows = 32;   // sums of a block: its tiles times all tokens

// More weights than this are read faster by more multiprocessors than a cluster has.
constexpr int64_t kMostBytes = 1200000;

template <class T, int tile_experts, class S>
struct FewTokens {
  using Product = RouterProduct<T, 64, tile_experts>;
  static_assert(S::lanes == 32);

  struct SharedStorage {
    typename Product::SharedStorage product;
    float sum[kRows][tile_experts];
    alignas(16) float logits[kTokens][S::experts];
    uint32_t chosen[kTokens][S::experts];
  };

  static __device__ void multiply(typename Product::Params const& p, SharedStorage& smem) {
    Product::run(p, smem.product, [&](int tile, auto const&, auto const& sum) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        int const token = fragment_row(threadIdx.x) + 8 * below;
        if (token >= p.tokens) continue;
        float* const row = smem.sum[tile / kBlocks * p.tokens + token];
#pragma unroll
        for (int i = 2 * below; i < tile_experts / 2; i += 4) {
          int const expert = 2 * (i - 2 * below) + fragment_column(threadIdx.x);
          *reinterpret_cast<float2*>(row + expert) = {sum[i], sum[i + 1]};
        }
      }
    });
  }

  static __device__ float logit(typename Product::Params const& p, SharedStorage const& smem,
                                int token, int expert) {
    float sum = 0;
#pragma unroll 8
    for (int part = 0; part < p.parts; ++part) {
      int const tile = part * p.across + expert / tile_experts;
      float const* const at = &smem.sum[tile / kBlocks * p.tokens + token][expert % tile_experts];
      float const value = load_from_block(at, tile % kBlocks);
      sum = part == 0 ? value : sum + value;
    }
    return sum;
  }
};

template <class Few, class S>
__global__ void __launch_bounds__(Few::Product::kThreads) route_few_kernel(
    __grid_constant__ typename Few::Product::Params const p, Route const x, Deal const deal) {
  extern __shared__ __align__(1024) char memory[];
  auto& smem = *reinterpret_cast<typename Few::SharedStorage*>(memory);
  Few::multiply(p, smem);
  cluster_barrier();
  int const warp = threadIdx.x / 32;
  for (int i = 0, token = blockIdx.x; token < p.tokens; ++i, token += kBlocks) {
    for (int e = threadIdx.x; e < p.experts; e += Few::Product::kThreads) {
      smem.logits[i][e] = Few::logit(p, smem, token, e);
    }
  }
  cluster_arrive();  // this thread has read the other blocks' sums
  __syncthreads();
  int const token = int(blockIdx.x) + kBlocks * warp;
  if (warp < kTokens && token < p.tokens) {
    Seat<S> seat;
    seat.token = token;
    route_token(x, deal, seat, smem.logits[warp], smem.chosen[warp]);
  }
  __syncwarp();
  cluster_wait();
}

template <class T, int tile_experts, class S>
bool launch_few(RouterLogits const& product, Route const& x, Deal const& deal, Queue const& queue) {
  using Few = FewTokens<T, tile_experts, S>;
  auto const p = router_params<typename Few::Product>(product, int(router_chunks(product.hidden)));
  if (ceil_div(p.tiles, kBlocks) * p.tokens > kRows) return false;
  auto const kernel = route_few_kernel<Few, S>;
  constexpr int bytes = sizeof(typename Few::SharedStorage);
  static AllowedOn allowed;
  allow_shared_memory(kernel, bytes, allowed, "shared memory of a router of few tokens");
  cuda_check(
      launch_one_cluster(kernel, kBlocks, Few::Product::kThreads, bytes, queue.stream, p, x, deal),
      "launch of a router of few tokens");
  return true;
}

}  // namespace

bool route_few(RouterLogits const& product, Route const& x, Queue const& queue) {
  bool const few = x.tokens > 0 && x.tokens <= kBlocks * kTokens && x.top_k <= kMostAlike &&
                   x.experts <= kMostSplitExperts &&
                   product.experts * product.hidden * 2 <= kMostBytes;
  if (!few) return false;
  check_on_gpu(product);
  bool done = false;
  bool const by_four = x.experts % 4 == 0;
  with_whole_warp(x.experts, x.router.groups, by_four, [&](auto shape, Deal const& deal) {
    using S = decltype(shape);
    with_type(product.dtype, [&](auto element) {
      using T = decltype(element);
      if constexpr (S::per_lane == 2) {
        done = launch_few<T, 32, S>(product, x, deal, queue);
      } else if constexpr (S::per_lane <= 16) {
        done = launch_few<T, 64, S>(product, x, deal, queue);
      }
    });
  });
  return done;
}

}  // namespace guild::cuda
