// D[group] = epilogue(A[group] B[group]^T) for every group, in one persistent launch.
//
//   warpgroup 0      producer: fills a ring of stages, 64 deep each (loaders.cuh)
//   warpgroups 1..   consumers: wgmma into registers, then the epilogue, 64 rows of the tile each
//
// An epilogue that reads a matrix of its own gets it through the same ring, 64 columns of the tile
// a stage, behind the tile's last products: it needs no memory besides and is asked for in time.
//
// The blocks of a cluster work on row tiles of one group that are neighbours and bring each other a
// share of B: a stage is filled for all of them, and free when the consumers of all have read it.
//
// Ragged tiles over packed tokens: SonicMoE (arXiv:2512.14080). Warp roles: CUTLASS.
#pragma once
#include "epilogues.cuh"
#include "loaders.cuh"

namespace guild::cuda {

template <class Element, GemmConfig C, class Loader, class Work, class Epilogue>
struct GroupedProduct {
  static constexpr GemmConfig config = C;
  using LoaderType = Loader;
  using WorkType = Work;
  using EpilogueType = Epilogue;

  struct Params {
    Work work;  // of block 0; block b starts at tile b
    typename Loader::Params load;
    Epilogue epilogue;
  };

  struct SharedStorage {
    alignas(1024) char a[C.stages][C.a_bytes()];
    alignas(1024) char b[C.stages][C.b_bytes()];
    typename Epilogue::Storage epilogue[C.consumers];
    Barrier full[C.stages];   // Loader::kArrivals, and the bytes of TMA
    Barrier empty[C.stages];  // one arrival per consumer warp of the cluster that reads the stage
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "too many stages for shared memory");

  struct Cursor {  // where we are in the ring of stages
    int stage = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++stage == C.stages) stage = 0, phase ^= 1;
    }
  };

  static __device__ Work tiles(Params const& p) {
    Work work = p.work;
    work.tile_m = C.cluster_m();  // constants, so that the walk divides by shifting
    work.band = kBand;
    work.next_tile = blockIdx.x / C.cluster;
    work.stride = gridDim.x / C.cluster;
    return work;
  }

  // The next tile of this block: a share of the cluster's, perhaps without rows.
  static __device__ bool next(Work& work, Tile& tile) {
    if (!work.next(tile)) return false;
    if constexpr (C.cluster > 1) {
      int const first = C.tile_m * cluster_rank();
      tile.row += first;
      tile.rows = max(tile.rows - first, 0);
    }
    tile.rows = min(tile.rows, C.tile_m);
    return true;
  }

  static __device__ void release(Barrier& empty) {
    if constexpr (C.cluster == 1) {
      empty.arrive();
    } else {
      for (int block = 0; block < C.cluster; ++block) empty.arrive_at(block);
    }
  }
  static __device__ int steps(Tile const& tile) { return (tile.inner + C.tile_k - 1) / C.tile_k; }

  static __device__ void produce(Params const& p, SharedStorage& smem, int thread) {
    Loader loader(p.load, thread);
    Cursor at;
    auto work = tiles(p);
    for (Tile tile; next(work, tile);) {
      loader.begin(tile);
      for (int step = 0; step < steps(tile); ++step, at.advance()) {
        smem.empty[at.stage].wait(at.phase ^ 1);
        loader.load(tile, step, smem.a[at.stage], smem.b[at.stage], smem.full[at.stage]);
      }
      if constexpr (Epilogue::kReads) {
        for (int unit = 0; unit < p.epilogue.units(tile); ++unit, at.advance()) {
          smem.empty[at.stage].wait(at.phase ^ 1);
          Barrier& full = smem.full[at.stage];
          if (thread == 0) p.epilogue.load(tile, unit, smem.b[at.stage], full);
          if constexpr (Loader::kThreads > 1) full.arrive_when_copied();
        }
      }
    }
  }

  using Accumulator = float[C.tile_n / 2];

  // One stage's products; they run on while this returns.
  static __device__ void multiply(Accumulator& acc, char* a, char* b, bool accumulate) {
    uint64_t const desc_a = descriptor<Loader::kMajorA>(shared_address(a));
    uint64_t const desc_b = descriptor<Loader::kMajorB>(shared_address(b));
    constexpr int step_a = kSliceBytes<Loader::kMajorA> / 16;
    constexpr int step_b = kSliceBytes<Loader::kMajorB> / 16;
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < C.tile_k / 16; ++slice) {
      mma_slice<Element, C.tile_n, Loader::kMajorA, Loader::kMajorB>(
          acc, desc_a + slice * step_a, desc_b + slice * step_b, accumulate || slice > 0);
    }
    wgmma_commit();
  }

  // Sums the tile over its steps, freeing each stage once the next one's products are under way.
  static __device__ void sum(Accumulator& acc, Cursor& at, Tile const& tile, SharedStorage& smem,
                             int thread) {
    int last = at.stage;  // the stage whose products may still run
    for (int step = 0; step < steps(tile); ++step, at.advance()) {
      // What cp.async wrote needs no proxy fence after this, as in CUTLASS's own such main loop. A
      // fence would wait for the arrival below at the other block: 150 to 350 cycles a step.
      smem.full[at.stage].wait(at.phase);
      fence_registers(acc);
      multiply(acc, smem.a[at.stage] + thread / 128 * kBlockBytes, smem.b[at.stage], step > 0);
      if (step > 0) {
        wgmma_wait<1>();
        if (thread % 32 == 0) release(smem.empty[last]);
      }
      last = at.stage;
    }
    wgmma_wait<0>();
    fence_registers(acc);
    if (tile.inner > 0 && thread % 32 == 0) release(smem.empty[last]);
  }

  // The epilogue, fed by the ring. Stage by stage: wait, turn 64 columns into results, store. Warp
  // 0, whose first thread stores from the stage, frees it when the next one's stores are under way.
  // One copy of the code, at which the accumulators pass by: unrolled it would outgrow the
  // instruction cache.
  static __device__ void finish(Params const& p, Accumulator& acc, Cursor& at, Tile const& part,
                                typename Epilogue::State& state, SharedStorage& smem, int thread) {
    int const group = thread / 128, units = p.epilogue.units(part);
    bool const stores = thread % 128 == 0, signals = thread % 32 == 0;
    int last = at.stage;
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit, at.advance()) {
      smem.full[at.stage].wait(at.phase);
      char* const stage = smem.b[at.stage] + group * kBlockBytes;
      if (part.rows > 0) p.epilogue.store_unit(acc, stage, state, part, unit, thread % 128);
#pragma unroll
      for (int i = 0; i + 32 < C.tile_n / 2; ++i) acc[i] = acc[i + 32];
      if (signals && !stores) release(smem.empty[at.stage]);
      if (stores && unit > 0) {
        tma_store_wait<1>();
        release(smem.empty[last]);
      }
      last = at.stage;
    }
    if (stores && units > 0) {
      tma_store_wait<0>();
      release(smem.empty[last]);
    }
    if (part.rows > 0) p.epilogue.finish(state, part, thread % 128);
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, int thread) {
    int const group = thread / 128;
    Accumulator acc;
    typename Epilogue::State state(smem.epilogue[group]);
    Cursor at;
    auto work = tiles(p);
    for (Tile tile; next(work, tile);) {
      Tile part = tile;  // this warpgroup's 64 rows
      part.row += 64 * group;
      part.rows = min(tile.rows - 64 * group, 64);
      if (part.rows > 0) p.epilogue.begin(state, part, thread % 128);
      if (tile.inner == 0) {
#pragma unroll
        for (float& x : acc) x = 0;
      }
      sum(acc, at, tile, smem, thread);
      if constexpr (Epilogue::kReads) {
        finish(p, acc, at, part, state, smem, thread);
      } else if (part.rows > 0) {
        p.epilogue.template store<C.tile_n>(acc, state, part, thread % 128);
      }
    }
    if (thread % 128 == 0) tma_store_wait<0>();  // shared memory must outlive the last store
  }

  static __device__ void sync() {
    if constexpr (C.cluster > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  static __device__ void run(Params const& p, SharedStorage& smem) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < C.stages; ++s) {
        smem.full[s].init(Loader::kArrivals);
        smem.empty[s].init(4 * C.consumers * C.cluster);
      }
      fence_barrier_init();
    }
    sync();
    if (threadIdx.x < 128) {
      shrink_registers<Loader::kRegisters>();
      if (threadIdx.x < Loader::kThreads) produce(p, smem, threadIdx.x);
    } else {
      grow_registers<168 + (168 - Loader::kRegisters) / C.consumers>();
      consume(p, smem, threadIdx.x - 128);
    }
    if constexpr (C.cluster > 1) sync();  // no block leaves while another may write to it
  }
};

// The only __global__ function of the products. nvcc 13.0 emits a host stub that does not compile
// for a kernel templated on a namespaced struct value, so GemmConfig travels inside Kernel.
template <class Kernel>
__global__ __launch_bounds__(Kernel::config.threads(), 1) void run(
    __grid_constant__ typename Kernel::Params const p) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(p, *reinterpret_cast<typename Kernel::SharedStorage*>(smem));
}

}  // namespace guild::cuda
