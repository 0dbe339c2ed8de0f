// The router's product for a few tokens, bitwise equal to product.cuh.
//
// A block computes one chunk of the sums of a few experts and has shared memory for all that it
// reads: all loads are in flight before the first product. kSteps steps of 64 along H take two TMA
// instructions; at these sizes, issuing loads for each step would take longer than memory does.
//
//   warp 0   loads weights by TMA
//   warp 1   loads rows of x by TMA
//   warps 0 .. 3 then multiply: tokens are wgmma's M, experts its N
#pragma once
#include <algorithm>

#include "cuda/alignment.h"
#include "cuda/arch/copy.cuh"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/router/bias.cuh"
#include "cuda/sm90/tensor_map.h"
#include "guild/router_logits.h"
#include "shared/router_product.h"

namespace guild::cuda {

// Fetches a box into L2.
__device__ inline void prefetch_box(CUtensorMap const& map, Coordinate at) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(at.x), "r"(at.y), "r"(at.z)
               : "memory");
}

// biased: whether there may be a bias; without, the kernel has fewer instructions to fetch.
template <class T, int block_experts, bool biased>
struct RouterProductOfFew {
  using Element = T;
  static constexpr int kExperts = block_experts, kThreads = 128;
  static constexpr int kSteps = 4;  // of a piece, 64 deep
  static constexpr int kMostPieces = int(kMostRouterChunk) / 64 / kSteps;
  static constexpr int kWeightBytes = kExperts * kRowBytes;  // of a step

  struct Params {
    CUtensorMap gate;       // as weight, of one row; after the last tile of experts comes its own
    float* gate_out;        // (parts, tokens)
    CUtensorMap x, weight;  // (steps, tokens or experts, 64); boxes of kSteps x all rows x 64
    RouterBias<T> bias;
    float* out;  // (parts, tokens, experts)
    int64_t part_stride;
    int64_t stride;  // of a token
    int tokens, experts;
    int rows;       // of x in a step: tokens, padded to eights
    int steps;      // of H
    int chunk;      // steps of a chunk
    bool in_pairs;  // whether two neighbouring logits can be stored at a time
  };

  // Dynamic shared memory: a chunk's rows of x, its weights, and a barrier for each piece. wgmma
  // reads 64 rows of x per step; where there are fewer, it reads what follows, and those results
  // are ignored. It is large enough that an SM holds only one block: blocks start while the
  // preceding kernel still fills all but a few SMs, and would crowd onto those few.
  static constexpr int kAlone = 115 * 1024;
  static constexpr int bytes(int chunk, int rows) {
    return std::max(kAlone,
                    chunk * (rows * kRowBytes + kWeightBytes) + kMostPieces * int(sizeof(Barrier)));
  }
  static constexpr int kMostBytes = bytes(int(kMostRouterChunk) / 64, kRouterTiles[0].tokens);

  // full: null if nothing has to be waited for.
  static __device__ void multiply(float (&acc)[kExperts / 2], Params const& p, int count,
                                  Barrier* full, uint32_t x, uint32_t weight) {
    constexpr int slice_step = kSliceBytes<Major::K> / 16;
    fence_registers(acc);
    for (int step = 0; step < count; ++step) {
      if (step % kSteps == 0 && full != nullptr) full[step / kSteps].wait(0);
      uint32_t const a = descriptor<Major::K>(x + step * p.rows * kRowBytes);
      uint32_t const b = descriptor<Major::K>(weight + step * kWeightBytes);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        mma_slice<T, kExperts, Major::K, Major::K>(acc, a + slice * slice_step,
                                                   b + slice * slice_step, step > 0 || slice > 0);
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    fence_registers(acc);
  }

  // Where a block's results go, and how many experts have some.
  struct Target {
    float* out;
    int64_t stride;
    int experts;
    bool in_pairs;

    __device__ Target(Params const& p, int part, bool gate)
        : out(gate ? p.gate_out + part * int64_t(p.tokens) : p.out + part * p.part_stride),
          stride(gate ? 1 : p.stride),
          experts(gate ? 1 : p.experts),
          in_pairs(p.in_pairs && !gate) {}
  };

  static __device__ void store(Target const& to, int tokens, int first_expert,
                               float const (&sum)[kExperts / 2]) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      int const token = fragment_row(threadIdx.x) + 8 * below;
      if (token >= tokens) continue;
      float* const row = to.out + token * to.stride;
#pragma unroll
      for (int block = 0; block < kExperts / 8; ++block) {
        int const expert = first_expert + 8 * block + fragment_column(threadIdx.x);
        float const first = sum[4 * block + 2 * below], second = sum[4 * block + 2 * below + 1];
        if (to.in_pairs && expert < to.experts) {
          *reinterpret_cast<float2*>(row + expert) = {first, second};
        } else {
          if (expert < to.experts) row[expert] = first;
          if (expert + 1 < to.experts) row[expert + 1] = second;
        }
      }
    }
  }

  // Two threads issue all of a chunk's loads, of weights and of x.
  static __device__ void load(Params const& p, CUtensorMap const& rows, int expert, int first,
                              int count, char* x, char* weight, Barrier* full) {
    bool const loads_weights = threadIdx.x == 0;
    if (loads_weights || threadIdx.x == 32) {
      CUtensorMap const& map = loads_weights ? rows : p.x;
      int const step_bytes = loads_weights ? kWeightBytes : p.rows * kRowBytes;
      char* const to = loads_weights ? weight : x;
      for (int i = 0; i < count; i += kSteps) {
        Barrier& barrier = full[i / kSteps];
        barrier.arrive_expect(kSteps * step_bytes);
        tma_load(map, to + i * step_bytes, {0, loads_weights ? expert : 0, first + i}, barrier);
      }
    }
    __syncwarp();
  }

  // Blocks: (tiles of experts and the gate's, chunks).
  static __device__ void run(Params const& p) {
    extern __shared__ __align__(1024) char memory[];
    char *const x = memory, *const weight = x + p.chunk * p.rows * kRowBytes;
    auto* const full = reinterpret_cast<Barrier*>(weight + p.chunk * kWeightBytes);
    bool const gate = int(blockIdx.x) * kExperts >= p.experts;
    CUtensorMap const& rows = gate ? p.gate : p.weight;
    int const part = blockIdx.y, first = part * p.chunk, expert = gate ? 0 : blockIdx.x * kExperts;
    int const count = min(p.chunk, p.steps - first);
    let_next_start();
    if (threadIdx.x == 0) {
      prefetch(rows);
      prefetch(p.x);
#pragma unroll
      for (int i = 0; i < kMostPieces; ++i) full[i].init(2);
      fence_barrier_init();
      // Only into L2: an earlier kernel may still be writing them.
      for (int i = 0; i < count; i += kSteps) prefetch_box(rows, {0, expert, first + i});
    }
    __syncthreads();
    // First a rehearsal, as in sm90/decode/plan_by_choice.cuh: one step on whatever shared memory
    // holds, with nothing stored.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      bool const rehearses = pass == 0;
      if (!rehearses) {
        wait_for_previous();
        load(p, rows, expert, first, count, x, weight, full);
      }
      float acc[kExperts / 2], sum[kExperts / 2];
      p.bias.begin(sum, expert, biased && part == 0 && !gate && !rehearses);
      forget_registers(acc);
      multiply(acc, p, rehearses ? 1 : count, rehearses ? nullptr : full, kept(shared_address(x)),
               kept(shared_address(weight)));
#pragma unroll
      for (int i = 0; i < kExperts / 2; ++i) sum[i] += acc[i];
      store(Target(p, part, gate), rehearses ? 0 : p.tokens, expert, sum);
    }
  }
};

template <class Product>
__global__ void __launch_bounds__(Product::kThreads) router_product_of_few_kernel(
    __grid_constant__ typename Product::Params const p) {
  Product::run(p);
}

// A matrix (rows, H) as steps: boxes of `box_rows` rows and kSteps steps.
template <class Product>
CUtensorMap steps_map(ConstRows rows, int64_t count, int64_t hidden, int box_rows,
                      char const* name) {
  return tensor_map(rows.data, dtype_of<typename Product::Element>(),
                    {.x = 64,
                     .y = count,
                     .z = hidden / 64,
                     .y_stride = row_stride(rows, hidden),
                     .z_stride = 64,
                     .box_x = 64,
                     .box_y = box_rows,
                     .box_z = Product::kSteps},
                    name);
}

// The parameters, except for where results go.
template <class Product>
typename Product::Params few_router_params(RouterLogits const& x) {
  typename Product::Params p{};
  p.tokens = int(x.tokens);
  p.experts = int(x.experts);
  p.rows = int(ceil_div(x.tokens, 8) * 8);
  p.steps = int(x.hidden / 64);
  p.chunk = int(router_chunk(x.hidden) / 64);
  p.x = steps_map<Product>(x.x, x.tokens, x.hidden, p.rows, "x");
  p.weight = steps_map<Product>(x.weight, x.experts, x.hidden, Product::kExperts, "weight");
  p.bias = router_bias<typename Product::Element>(x);
  if (x.gate.data != nullptr) {
    p.gate = steps_map<Product>(x.gate, 1, x.hidden, Product::kExperts, "gate");
    p.gate_out = static_cast<float*>(x.gate_workspace);
  }
  return p;
}

}  // namespace guild::cuda
