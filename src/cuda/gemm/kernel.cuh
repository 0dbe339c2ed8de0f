// D[group] = epilogue(A[group] B[group]^T) for every group, in one persistent launch.
//
//   warpgroup 0      producer: fills a ring of stages, 64 deep each (loaders.cuh)
//   warpgroups 1..   consumers: wgmma into registers, then the epilogue, 64 rows of the tile each
//                    ("cooperative") or whole tiles in turns ("ping-pong")
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
    // In turns: consumer g may sum once turn[g] has been arrived at, by the other when it has taken
    // its last stage; ahead of that it would take a phase of a stage for the one after next.
    Barrier turn[C.consumers];
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "too many stages for shared memory");

  struct Cursor {  // where we are in the ring of stages
    int stage = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++stage == C.stages) stage = 0, phase ^= 1;
    }
    __device__ void skip(int steps) {
      phase ^= (stage + steps) / C.stages & 1;
      stage = (stage + steps) % C.stages;
    }
  };

  static __device__ Work tiles(Params const& p) {
    Work work = p.work;
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
    }
  }

  static constexpr int kParts = C.parts();
  using Accumulator = float[kParts][C.tile_n / 2];

  // One stage's products; they run on while this returns.
  static __device__ void multiply(Accumulator& acc, char* a, char* b, bool accumulate) {
    uint64_t const desc_a = descriptor<Loader::kMajorA>(shared_address(a));
    uint64_t const desc_b = descriptor<Loader::kMajorB>(shared_address(b));
    constexpr int step_a = kSliceBytes<Loader::kMajorA> / 16;
    constexpr int step_b = kSliceBytes<Loader::kMajorB> / 16;
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < C.tile_k / 16; ++slice) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        mma_slice<Element, C.tile_n, Loader::kMajorA, Loader::kMajorB>(
            acc[part], desc_a + slice * step_a + part * (kBlockBytes / 16), desc_b + slice * step_b,
            accumulate || slice > 0);
      }
    }
    wgmma_commit();
  }

  // Sums the tile over its steps, freeing each stage once the next one's products are under way.
  static __device__ void sum(Accumulator& acc, Cursor& at, Tile const& tile, SharedStorage& smem,
                             int thread) {
    int const group = thread / 128, first_block = C.in_turns ? 0 : group;
    int last = at.stage;  // the stage whose products may still run
    for (int step = 0; step < steps(tile); ++step, at.advance()) {
      smem.full[at.stage].wait(at.phase);
#pragma unroll
      for (auto& part : acc) fence_registers(part);
      multiply(acc, smem.a[at.stage] + first_block * kBlockBytes, smem.b[at.stage], step > 0);
      if (step > 0) {
        wgmma_wait<1>();
        if (thread % 32 == 0) release(smem.empty[last]);
      }
      last = at.stage;
    }
    if (C.in_turns && thread % 128 == 0) smem.turn[(group + 1) % C.consumers].arrive();
    wgmma_wait<0>();
#pragma unroll
    for (auto& part : acc) fence_registers(part);
    if (tile.inner > 0 && thread % 32 == 0) release(smem.empty[last]);
  }

  // 64 rows of the tile, from block `block` of 64 rows on.
  static __device__ Tile rows_of(Tile tile, int block) {
    tile.row += 64 * block;
    tile.rows = min(tile.rows - 64 * block, 64);
    return tile;
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, int thread) {
    int const group = thread / 128, first_block = C.in_turns ? 0 : group;
    Accumulator acc;
    typename Epilogue::State state(smem.epilogue[group]);
    Cursor at;
    auto work = tiles(p);
    Tile tile;
    for (int turn = 0; next(work, tile); ++turn) {
      if (C.in_turns && turn % C.consumers != group) {
        at.skip(steps(tile));
        continue;
      }
      Tile part = rows_of(tile, first_block);
      if (part.rows > 0) p.epilogue.begin(state, part, thread % 128);
      if (tile.inner == 0) {
#pragma unroll
        for (int i = 0; i < kParts * C.tile_n / 2; ++i) {
          acc[i / (C.tile_n / 2)][i % (C.tile_n / 2)] = 0;
        }
      }
      if constexpr (C.in_turns) {
        smem.turn[group].wait(((turn / C.consumers + 1) ^ group) & 1);
      }
      sum(acc, at, tile, smem, thread);
#pragma unroll 1
      for (int i = 0; i < kParts; ++i) {  // one copy of the epilogue: the next part moves up
        part = rows_of(tile, first_block + i);
        if (part.rows > 0) {
          if (i > 0) p.epilogue.begin(state, part, thread % 128);
          p.epilogue.template store<C.tile_n>(acc[0], state, part, thread % 128);
        }
#pragma unroll
        for (int j = 0; j < C.tile_n / 2; ++j) acc[0][j] = acc[kParts - 1][j];
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
        smem.empty[s].init(4 * (C.in_turns ? 1 : C.consumers) * C.cluster);
      }
      for (auto& t : smem.turn) t.init(1);
      for (auto& e : smem.epilogue) Epilogue::init(e);
      fence_barrier_init();
    }
    sync();
    if (threadIdx.x < 128) {
      shrink_registers<Registers<C>::kProducer>();
      if (threadIdx.x < Loader::kThreads) produce(p, smem, threadIdx.x);
    } else {
      grow_registers<Registers<C>::kConsumer>();
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
