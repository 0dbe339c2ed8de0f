// The router's product: logits = x W^T + bias in float32, bitwise equal for any number of tokens.
//
// Tokens are wgmma's M, experts its N. H is summed in chunks: one accumulator per chunk starts at
// zero and takes slices of 16; chunk sums are then added in order in float32, the first to the
// bias. A block computes one tile of tokens and experts, over all chunks or, where tokens are few,
// over a single chunk (split K), whose sum it stores for the next kernel to add. Neither the split
// nor the tile shape changes any bit.
//
//   warps 0 .. 4 n - 1   consumers: n warpgroups, 64 tokens each
//   warp 4 n             producer: x and W by TMA through a ring of stages, each 64 deep
#pragma once
#include "cuda/arch/copy.cuh"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/cursor.cuh"
#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/router/product_few.cuh"
#include "guild/router_logits.h"
#include "shared/router_product.h"

namespace guild::cuda {

// Up to this many tokens, a block prefetches its weights: few other blocks read the same ones.
inline constexpr int64_t kFewForRouter = 256;

template <class T, int tile_tokens, int tile_experts>
struct RouterProduct {
  using Element = T;
  static constexpr int kTokens = tile_tokens, kExperts = tile_experts;
  static constexpr int kWarpgroups = tile_tokens / 64, kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kThreads = 32 * (kConsumerWarps + 1);
  // Resident blocks per SM. With 128 experts the accumulators leave no room for two.
  static constexpr int kAtOnce = tile_experts == 128 ? 1 : 2;

  struct Params {
    CUtensorMap x, weight;  // boxes of 64 of H and the tile's tokens or experts
    RouterBias<T> bias;
    float* out;  // (parts, tokens, experts)
    int64_t part_stride;
    int64_t stride;  // of a token
    int tokens, experts;
    int across;     // tiles of experts
    int parts;      // 1, or as many as there are chunks
    int steps;      // of H, 64 deep
    int chunk;      // steps of a chunk
    int tiles;      // in all
    bool in_pairs;  // whether two neighbouring logits can be stored at a time
    bool few;       // whether weights are read by few blocks, so that it pays to fetch them early
  };

  struct Stage {
    alignas(1024) char x[tile_tokens * kRowBytes];
    alignas(1024) char weight[tile_experts * kRowBytes];
  };
  static constexpr int kStages = 200 * 1024 / kAtOnce / int(sizeof(Stage));
  struct SharedStorage {
    Stage stage[kStages];
    Barrier full[kStages], empty[kStages];
  };
  using Cursor = cuda::Cursor<kStages, int>;

  // A tile and its steps of H.
  struct Work {
    int token, expert, part, first, end;

    __device__ Work(Params const& p, int tile) {
      int const depth = p.parts > 1 ? p.chunk : p.steps;
      expert = tile % p.across * tile_experts;
      part = tile / p.across % p.parts;
      token = tile / p.across / p.parts * tile_tokens;
      first = part * depth;
      end = min(first + depth, p.steps);
    }
  };

  static __device__ void produce(Params const& p, SharedStorage& smem) {
    if (threadIdx.x % 32 != 0) return;
    // Only into L2: an earlier kernel may still be writing them.
    for (int tile = blockIdx.x; p.few && tile < p.tiles; tile += gridDim.x) {
      Work const work(p, tile);
      for (int step = work.first; step < work.end; ++step) {
        prefetch_box(p.weight, {64 * step, 0, work.expert});
      }
    }
    wait_for_previous();
    Cursor at;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
      Work const work(p, tile);
      for (int step = work.first; step < work.end; ++step, at.advance()) {
        Stage& stage = smem.stage[at.stage];
        Barrier& full = smem.full[at.stage];
        smem.empty[at.stage].wait(at.phase ^ 1);
        full.arrive_expect(sizeof stage.x + sizeof stage.weight);
        tma_load(p.weight, stage.weight, {64 * step, 0, work.expert}, full);
        tma_load(p.x, stage.x, {64 * step, 0, work.token}, full);
      }
    }
  }

  // acc = the sum over `count` steps, at most a chunk.
  static __device__ void sum_chunk(float (&acc)[tile_experts / 2], Cursor& at, int count,
                                   SharedStorage& smem) {
    constexpr int slice_step = kSliceBytes<Major::K> / 16;
    bool const leads = threadIdx.x % 32 == 0;
    uint32_t const stage0 = kept(shared_address(&smem.stage[0]));
    uint32_t const own = threadIdx.x / 128 * uint32_t(kBlockBytes);
    int i = 0;
    do {
      smem.full[at.stage].wait(at.phase);
      uint32_t const base = stage0 + at.stage * uint32_t(sizeof(Stage));
      uint32_t const a = descriptor<Major::K>(base + own);
      uint32_t const b = descriptor<Major::K>(base + uint32_t(sizeof(Stage::x)));
      fence_registers(acc);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        mma_slice<T, tile_experts, Major::K, Major::K>(acc, a + slice * slice_step,
                                                       b + slice * slice_step, i > 0 || slice > 0);
      }
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        if (leads) smem.empty[at.before(1)].arrive();
      }
      at.advance();
    } while (++i < count);
    wgmma_wait<0>();
    fence_registers(acc);
    if (leads) smem.empty[at.before(1)].arrive();
  }

  static __device__ void store(Params const& p, Work const& work,
                               float const (&sum)[tile_experts / 2]) {
    int const thread = threadIdx.x % 128;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      int const token = work.token + int(threadIdx.x) / 128 * 64 + fragment_row(thread) + 8 * below;
      if (token >= p.tokens) continue;
      float* const row = p.out + work.part * p.part_stride + token * p.stride;
#pragma unroll
      for (int block = 0; block < tile_experts / 8; ++block) {
        int const expert = work.expert + 8 * block + fragment_column(thread);
        float const first = sum[4 * block + 2 * below], second = sum[4 * block + 2 * below + 1];
        if (p.in_pairs && expert < p.experts) {
          *reinterpret_cast<float2*>(row + expert) = {first, second};
        } else {
          if (expert < p.experts) row[expert] = first;
          if (expert + 1 < p.experts) row[expert + 1] = second;
        }
      }
    }
  }

  static __device__ void consume(Params const& p, SharedStorage& smem) {
    wait_for_previous();  // what it read may be overwritten
    Cursor at;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
      Work const work(p, tile);
      float acc[tile_experts / 2], total[tile_experts / 2];
      forget_registers(acc);
      p.bias.begin(total, work.expert, work.part == 0);
      for (int step = work.first; step < work.end; step += p.chunk) {
        sum_chunk(acc, at, min(p.chunk, work.end - step), smem);
#pragma unroll
        for (int i = 0; i < tile_experts / 2; ++i) {
          total[i] += acc[i];
        }
      }
      store(p, work, total);
    }
  }

  static __device__ void run(Params const& p) {
    extern __shared__ __align__(1024) char memory[];
    auto& smem = *reinterpret_cast<SharedStorage*>(memory);
    let_next_start();
    if (threadIdx.x == 0) {
      prefetch(p.x);
      prefetch(p.weight);
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        smem.full[i].init(1);
        smem.empty[i].init(kConsumerWarps);
      }
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x / 32 == kConsumerWarps) {
      produce(p, smem);
    } else {
      consume(p, smem);
    }
  }
};

template <class Product>
__global__ void __launch_bounds__(Product::kThreads, Product::kAtOnce) router_product_kernel(
    __grid_constant__ typename Product::Params const p) {
  Product::run(p);
}

// The parameters of a product whose sums are in `parts`, except for where they go.
template <class Product>
typename Product::Params router_params(RouterLogits const& x, int parts) {
  using T = typename Product::Element;
  constexpr int tokens = Product::kTokens, experts = Product::kExperts;
  typename Product::Params p{};
  p.x = row_map<T>(x.x, x.tokens, x.hidden, 1, tokens, "x");
  p.weight = row_map<T>(x.weight, x.experts, x.hidden, 1, experts, "weight");
  p.bias = router_bias<T>(x);
  p.tokens = int(x.tokens);
  p.experts = int(x.experts);
  p.across = int(ceil_div(x.experts, experts));
  p.parts = parts;
  p.steps = int(ceil_div(x.hidden, 64));
  p.chunk = int(router_chunk(x.hidden) / 64);
  p.few = x.tokens <= kFewForRouter;
  int64_t const tiles = ceil_div(x.tokens, tokens) * p.across * parts;
  require(tiles < int64_t(1) << 31, "tokens: expected fewer than 2^31 tiles, got ", tiles);
  p.tiles = int(tiles);
  return p;
}

}  // namespace guild::cuda
