// D[group] = epilogue(A[group] B[group]^T) for every group, in one persistent launch.
//
//   warpgroup 0      producer: fills a ring of stages, 64 deep each (loaders.cuh)
//   warpgroups 1..   consumers: wgmma into registers, then the epilogue, 64 rows of a tile each
//                    or, in turns, every other tile whole
//
// An epilogue that reads a matrix of its own gets it through the same ring, 64 columns of the tile
// a stage, behind the tile's last products: it needs no memory besides and is asked for in time.
//
// The blocks of a cluster work on row tiles of one group that are neighbours and bring each other a
// share of B: a stage is filled for all of them, and free when the consumers of all have read it.
// Where a group's rows leave but one row tile, they take two of its columns, each with a B of its
// own.
//
// Ragged tiles over packed tokens: SonicMoE (arXiv:2512.14080). Warp roles: CUTLASS.
#pragma once
#include "epilogues.cuh"
#include "loaders.cuh"

namespace guild::cuda {

template <class Element, GemmConfig C, class Loader, class Work, class Epilogue>
struct GroupedProduct {
  static constexpr GemmConfig config = C;

  struct Params {
    Work work;  // of block 0; block b starts at tile b
    typename Loader::Params load;
    Epilogue epilogue;
  };

  struct SharedStorage {
    alignas(1024) char a[C.stages][C.a_bytes()];
    alignas(1024) char b[C.stages][C.b_bytes()];
    typename Epilogue::Storage epilogue[C.consumers];
    Barrier full[C.stages];     // Loader::kArrivals, and the bytes of TMA
    Barrier empty[C.stages];    // one arrival per consumer warp of the cluster that reads the stage
    Barrier turn[C.consumers];  // in turns: this consumer may take its tile's stages
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "too many stages for shared memory");

  struct Cursor {  // where we are in the ring of stages
    int stage = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++stage == C.stages) stage = 0, phase ^= 1;
    }
    __device__ int before(int count) const { return (stage + C.stages - count) % C.stages; }
    __device__ void advance(int count) {
      int const end = stage + count;
      stage = end % C.stages;
      phase ^= end / C.stages & 1;
    }
  };

  static __device__ Work tiles(Params const& p) {
    Work work = p.work;
    work.tile_m = C.cluster_m();  // constants, so that the walk divides by shifting
    work.tail_m = C.cluster == 2 ? C.tile_m : 0;
    work.band = kBand;
    work.next_tile = blockIdx.x / C.cluster;
    work.stride = gridDim.x / C.cluster;
    return work;
  }

  // The next tile of this block: a share of the cluster's, perhaps without rows.
  static __device__ bool next(Work& work, Tile& tile) {
    if (!work.next(tile)) return false;
    int const rank = C.cluster == 1 ? 0 : cluster_rank();
    tile = share_of(tile, rank, C.tile_m, work.tile_n, work.across * work.tile_n);
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
    // Finding a tile takes a while: the next one's place is found while this one's stages fill.
    Tile tile, following;
    for (bool more = next(work, tile); more; tile = following) {
      int const count = steps(tile);
      loader.begin(tile);
      for (int step = 0; step < count; ++step, at.advance()) {
        smem.empty[at.stage].wait(at.phase ^ 1);
        loader.load(tile, step, smem.a[at.stage], smem.b[at.stage], smem.full[at.stage]);
        if (step == 0) more = next(work, following);
      }
      if (count == 0) more = next(work, following);
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

  // A consumer's part of a tile: 64 rows each.
  static constexpr int kParts = C.consumer_rows() / 64;
  using Accumulator = float[kParts][C.tile_n / 2];

  // One stage's products; they run on while this returns. a, b: descriptors of its operands.
  static __device__ void multiply(Accumulator& acc, uint32_t a, uint32_t b, bool accumulate) {
    constexpr int step_a = kSliceBytes<Loader::kMajorA> / 16;
    constexpr int step_b = kSliceBytes<Loader::kMajorB> / 16;
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < C.tile_k / 16; ++slice) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        mma_slice<Element, C.tile_n, Loader::kMajorA, Loader::kMajorB>(
            acc[part], a + slice * step_a + part * (kBlockBytes / 16), b + slice * step_b,
            accumulate || slice > 0);
      }
    }
    wgmma_commit();
  }

  static __device__ void fence(Accumulator& acc) {
#pragma unroll
    for (auto& part : acc) fence_registers(part);
  }

  // Sums the tile over its steps, freeing each stage once the next one's products are under way.
  // meanwhile(step): done for steps 0 and 1 while their products run. The last `kept` stages are
  // not freed.
  template <class F>
  static __device__ void sum(Accumulator& acc, bool started, Cursor& at, Tile const& tile,
                             SharedStorage& smem, int thread, int kept, F&& meanwhile) {
    int const group = thread / 128, count = steps(tile);
    int const first = C.in_turns ? 0 : group * kBlockBytes;  // of this consumer's rows of A
    uint32_t const full = kept_address(shared_address(smem.full));
    uint32_t const a = descriptor<Loader::kMajorA>(shared_address(smem.a[0]) + first);
    uint32_t const b = descriptor<Loader::kMajorB>(shared_address(smem.b[0]));
    for (int step = 0; step < count; ++step, at.advance()) {
      // What cp.async wrote needs no proxy fence after this, as in CUTLASS's own such main loop. A
      // fence would wait for the arrival below at the other block: 150 to 350 cycles a step.
      Barrier::wait_at(full + at.stage * sizeof(Barrier), at.phase);
      fence(acc);
      multiply(acc, a + at.stage * (C.a_bytes() / 16), b + at.stage * (C.b_bytes() / 16),
               started || step > 0);
      if (step < 2) meanwhile(step);
      if (step > 0) {
        wgmma_wait<1>();
        if (thread % 32 == 0 && step <= count - kept) release(smem.empty[at.before(1)]);
      }
    }
    for (int step = count; step < 2; ++step) meanwhile(step);
    if (C.in_turns && thread % 32 == 0) smem.turn[1 - group].arrive();
    wgmma_wait<0>();
    fence(acc);
    if (count > 0 && thread % 32 == 0 && kept == 0) release(smem.empty[at.before(1)]);
  }

  // Stages that stores still read, and their number, at most two; a warp's first thread keeps them
  // until the stores that it has issued are through.
  struct Lent {
    int count = 0, last = 0, before = 0;
  };
  // A tile's last stages lend this consumer's share of A to its stores.
  static __device__ void lend(Lent& lent, int count, Cursor const& at,
                              typename Epilogue::State& ring, SharedStorage& smem, int thread) {
    lent = {count, at.before(1), at.before(2)};
    int const share = thread / 128 * kBlockBytes;
    ring.begin(count, smem.a[lent.last] + share, smem.a[lent.before] + share, thread % 128);
  }
  static __device__ void take_back(Lent& lent, SharedStorage& smem, int thread) {
    if (thread % 32 == 0 && lent.count > 0) {
      tma_store_wait<0>();
      if (lent.count > 1) release(smem.empty[lent.before]);
      release(smem.empty[lent.last]);
    }
    lent.count = 0;
  }

  // The epilogue, fed by the ring. Stage by stage: wait, turn 64 columns into results, store. One
  // thread stores, of another warp each time; its warp frees the stage when the stores have read
  // it, at the next one. One copy of the code, at which the accumulators pass by: unrolled it would
  // outgrow the instruction cache.
  static __device__ void finish(Params const& p, float (&acc)[C.tile_n / 2], Cursor& at, Lent& lent,
                                Tile const& part, typename Epilogue::State& state,
                                SharedStorage& smem, int thread) {
    int const share = thread / 128 * kBlockBytes, units = p.epilogue.units(part);
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit, at.advance()) {
      int const storer = unit % 4 * 32;
      smem.full[at.stage].wait(at.phase);
      if (part.rows > 0) {
        p.epilogue.store_unit(acc, smem.a[at.stage] + share, smem.b[at.stage] + share, state, part,
                              unit, thread % 128, storer);
      }
#pragma unroll
      for (int i = 0; i + 32 < C.tile_n / 2; ++i) acc[i] = acc[i + 32];
      take_back(lent, smem, thread);
      if (thread % 128 == storer) {
        lent = {1, at.stage};
      } else if (thread % 32 == 0) {
        release(smem.empty[at.stage]);
      }
    }
    if (part.rows > 0) p.epilogue.finish(state, part, thread % 128);
  }

  // The tile's rows from 64 * `part`, perhaps none.
  static __device__ Tile own_rows(Tile tile, int part) {
    tile.row += 64 * part;
    tile.rows = min(tile.rows - 64 * part, 64);
    return tile;
  }

  // The epilogue of the consumer's 64 rows, or of each of its parts in turn, in one copy of the
  // code.
  static __device__ void store(Params const& p, Accumulator& acc, Cursor& at, Lent& lent,
                               Tile const& tile, typename Epilogue::State& state,
                               SharedStorage& smem, int thread) {
#pragma unroll 1
    for (int i = 0; i < kParts; ++i) {
      Tile const part = own_rows(tile, C.in_turns ? i : thread / 128);
      if constexpr (Epilogue::kReads) {
        finish(p, acc[0], at, lent, part, state, smem, thread);
      } else if (part.rows > 0) {
        p.epilogue.template store<C.tile_n>(acc[0], state, part, thread % 128);
      }
      if constexpr (kParts > 1) {
#pragma unroll
        for (int v = 0; v < C.tile_n / 2; ++v) acc[0][v] = acc[1][v];
      }
    }
  }

  // What the sum begins with, if anything.
  static __device__ bool start(Params const& p, Accumulator& acc, Tile const& tile, int thread) {
    bool started = false;
#pragma unroll
    for (auto& part : acc) {
      started = p.epilogue.template start<C.tile_n>(part, tile, thread % 128);
      if (started || tile.inner > 0) continue;
#pragma unroll
      for (float& x : part) x = 0;
    }
    return started;
  }

  static __device__ void consume_together(Params const& p, Accumulator& acc,
                                          typename Epilogue::State& state, SharedStorage& smem,
                                          int thread) {
    constexpr bool kLends = requires { state.begin(0, nullptr, nullptr, 0); };
    Cursor at;
    Lent lent;
    auto work = tiles(p);
    Tile tile, following;
    for (bool more = next(work, tile); more; tile = following) {
      if constexpr (Epilogue::kReads) {
        p.epilogue.begin(state, own_rows(tile, thread / 128), thread % 128);
      }
      bool const started = start(p, acc, tile, thread);
      int const keep = kLends ? min(steps(tile), 2) : 0;
      sum(acc, started, at, tile, smem, thread, keep, [&](int step) {
        if (step == 0) {
          take_back(lent, smem, thread);
        } else {
          more = next(work, following);  // takes as long as a step
        }
      });
      if constexpr (kLends) lend(lent, keep, at, state, smem, thread);
      store(p, acc, at, lent, tile, state, smem, thread);
    }
  }

  // A consumer takes its tile's stages when the other has the last of the tile before: a barrier's
  // parity tells neighbouring phases apart only.
  static __device__ void consume_in_turns(Params const& p, Accumulator& acc,
                                          typename Epilogue::State& state, SharedStorage& smem,
                                          int thread) {
    static_assert(C.consumers == 2 && !Epilogue::kReads);
    int const group = thread / 128;
    Cursor at;
    Lent lent;
    auto work = tiles(p);
    Tile tile;
    if (group == 1 && next(work, tile)) at.advance(steps(tile));
    uint32_t phase = group ^ 1;  // of the barrier to wait at: the first consumer's first is past
    while (next(work, tile)) {
      bool const started = start(p, acc, tile, thread);
      smem.turn[group].wait(phase);
      phase ^= 1;
      sum(acc, started, at, tile, smem, thread, 0, [](int) {});
      store(p, acc, at, lent, tile, state, smem, thread);
      if (next(work, tile)) at.advance(steps(tile));  // the other's
    }
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, int thread) {
    Accumulator acc;
    typename Epilogue::State state(smem.epilogue[thread / 128]);
    if constexpr (C.in_turns) {
      consume_in_turns(p, acc, state, smem, thread);
    } else {
      consume_together(p, acc, state, smem, thread);
    }
    if (thread % 32 == 0) tma_store_wait<0>();  // shared memory must outlive the last store
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
      for (Barrier& turn : smem.turn) turn.init(4);
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
