// The consumers' main loop: wgmma over the stages of a tile's sum.
//
// In products by row, a consumer that has no rows of a tile only releases the stages.
#pragma once
#include "cuda/sm90/column_sums.cuh"
#include "cuda/sm90/cursor.cuh"
#include "cuda/sm90/loaders.cuh"
#include "cuda/warp.cuh"

namespace guild::cuda {

struct Self {  // a thread of a consumer
  int group;   // which consumer, known to the compiler as the same for all lanes of a warp
  int thread;  // of its 128
  __device__ Self() : group(warp_index() / 4 - 1), thread(threadIdx.x % 128) {}
  __device__ bool leads_warp() const { return thread % 32 == 0; }
};

template <GemmConfig C, OperandLoader Loader, class Int>
struct MainLoop {
  using Work = typename Loader::Work;
  using Cursor = cuda::Cursor<C.stages, Int>;

  // Whether to skip products of rows that a tile of at most 64 rows does not have. Not in weight
  // gradients: blocks with short tiles run ahead, and operands that others still need are evicted
  // from L2, which costs up to 11 % (docs/measured/experiments.md).
  static constexpr bool kSkipsRows = !Work::kMayBeEmpty;

  // Where groups split the inner dimension, a sum's last step is half empty on average. A separate
  // loop after the main loop multiplies only the slices of 16 that exist; a branch inside the main
  // loop costs more than it saves (docs/measured/experiments.md).
  static constexpr bool kRaggedSums = Work::kMayBeEmpty;

  // wgmma has M = 64: a consumer's rows of a tile are this many parts.
  static constexpr int kParts = C.consumer_rows() / 64;
  using Sums = float[kParts][C.tile_n / 2];

  static __device__ int steps(Tile const& tile) { return (tile.inner + C.tile_k - 1) / C.tile_k; }

  static __device__ void release(Barrier& empty) {
    if constexpr (C.cluster == 1) {
      empty.arrive();
    } else {
      for (int block = 0; block < C.cluster; ++block) empty.arrive_at(block);
    }
  }

  // Sums the tile over its steps. A stage is released once the next stage's products are in flight.
  //
  //   meanwhile(step, takes)   called while each whole step's products are in flight, once if the
  //                            sum is empty; `takes` marks the step at which to take the next tile
  //                            from the queue
  //   side                     sums of each step's A (column_sums.cuh)
  //   parts                    how many of the consumer's parts of 64 rows to multiply
  template <int parts = kParts, class F, class Side = NoSideSums>
  static __device__ void sum(Sums& acc, bool started, Cursor& at, Tile const& tile, auto& smem,
                             Self self, F&& meanwhile, Side side = {}) {
    int const count = steps(tile);
    int const first = C.in_turns ? 0 : self.group * kBlockBytes;  // of this consumer's rows of A
    uint32_t const full = kept(shared_address(smem.full));
    uint32_t const a = kept(descriptor<Loader::kMajorA>(shared_address(smem.a[0]) + first));
    uint32_t const b = kept(descriptor<Loader::kMajorB>(shared_address(smem.b[0])));
    if constexpr (Work::kMayBeEmpty) {
      if (count == 0) {
#pragma unroll
        for (auto& part : acc) clear_registers(part);
        meanwhile(0, true);
        return;
      }
    }
    // do-while: the compiler must know that at least one step runs and defines the accumulators.
    int const whole = kRaggedSums ? max(tile.inner / C.tile_k, 1) : count;
    int step = 0;
#pragma unroll 1
    do {
      // No proxy fence for what cp.async wrote, as in CUTLASS's main loop with cp.async. A fence
      // would also wait for the arrival below at the other block: 150 to 350 cycles per step.
      Barrier::wait_at(full + at.stage * sizeof(Barrier), at.phase);
      fence(acc);
      side.start(shared_address(smem.a[at.stage]) + first);
      multiply<parts>(acc, a + at.stage * (C.a_bytes() / 16), b + at.stage * (C.b_bytes() / 16),
                      started || step > 0);
      if (step > 0) {
        wgmma_wait<1>();
        if (self.leads_warp()) release(smem.empty[at.before(1)]);
      }
      side.finish(step);
      meanwhile(step, step + 1 == whole);
      at.advance();
    } while (++step < whole);
    if (whole < count) {
      Barrier::wait_at(full + at.stage * sizeof(Barrier), at.phase);
      fence(acc);
      multiply_rest<parts>(acc, a + at.stage * (C.a_bytes() / 16),
                           b + at.stage * (C.b_bytes() / 16), tile.inner % C.tile_k);
      wgmma_wait<1>();
      if (self.leads_warp()) release(smem.empty[at.before(1)]);
      at.advance();
    }
    if (C.in_turns && self.leads_warp()) smem.turn[1 - self.group].arrive();
    wgmma_wait<0>();
    fence(acc);
    if (self.leads_warp()) release(smem.empty[at.before(1)]);
  }

  // For a consumer that has no rows of a tile: releases the tile's `count` stages unused.
  static __device__ void pass(int count, Cursor& at, auto& smem, Self self) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, at.advance()) {
      smem.full[at.stage].wait(at.phase);
      if (self.leads_warp()) release(smem.empty[at.stage]);
    }
  }

 private:
  static constexpr int kSliceA = kSliceBytes<Loader::kMajorA> / 16;
  static constexpr int kSliceB = kSliceBytes<Loader::kMajorB> / 16;

  // Issues the products of one slice of a stage. a, b: descriptors of its operands.
  template <int parts>
  static __device__ void multiply_slice(Sums& acc, uint32_t a, uint32_t b, bool accumulate) {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      mma_slice<typename Loader::Element, C.tile_n, Loader::kMajorA, Loader::kMajorB>(
          acc[part], a + part * (kBlockBytes / 16), b, accumulate);
    }
  }

  // Issues one stage's products, which run asynchronously.
  template <int parts>
  static __device__ void multiply(Sums& acc, uint32_t a, uint32_t b, bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < C.tile_k / kSliceDepth; ++slice) {
      multiply_slice<parts>(acc, a + slice * kSliceA, b + slice * kSliceB, accumulate || slice > 0);
    }
    wgmma_commit();
  }

  // The same for the first `depth` of a stage, in whole slices, added to the sums. Operands are
  // zero past `depth`. The last slice may still be in flight on return.
  template <int parts>
  static __device__ void multiply_rest(Sums& acc, uint32_t a, uint32_t b, int depth) {
#pragma unroll 1
    for (; depth > 0; depth -= kSliceDepth, a += kSliceA, b += kSliceB) {
      wgmma_fence();
      multiply_slice<parts>(acc, a, b, true);
      wgmma_commit();
    }
  }

  static __device__ void fence(Sums& acc) {
#pragma unroll
    for (auto& part : acc) fence_registers(part);
  }
};

}  // namespace guild::cuda
