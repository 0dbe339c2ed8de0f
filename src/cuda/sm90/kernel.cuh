// D[group] = epilogue(A[group] B[group]^T) for all groups: a persistent, warp-specialised grouped
// GEMM.
//
//   warpgroup 0      producer: fills a ring of stages, 64 deep along K (loaders.cuh). One warp also
//                    schedules tiles and hands them to all others (tile_queue.cuh): warp 0 if all
//                    four warps load, else a warp that does not load
//   warpgroups 1..   consumers: wgmma, then the epilogue (epilogues.cuh). Each takes 64 rows of
//                    every tile (cooperative) or, with C.in_turns, every other tile (ping-pong)
//
// An epilogue that reads a matrix gets it through the same ring, after the stages of the tile's
// sum, 64 columns of the tile per stage. It needs no further shared memory, and its loads are
// issued early. Other epilogues overlap their stores with the next tile's products, except those
// that defer nothing (AllAtOnce).
//
// The blocks of a cluster work on neighbouring row tiles of one group and share B: each loads its
// part and multicasts it to all. A stage is free once the consumers of all blocks have read it.
// Where a group has a single row tile left, the blocks take neighbouring column tiles instead, each
// with its own B.
//
// Ragged tiles over packed tokens: SonicMoE (arXiv:2512.14080). Warp roles: CUTLASS.
#pragma once
#include "cuda/arch/cluster.cuh"
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/main_loop.cuh"
#include "cuda/sm90/tile_queue.cuh"

namespace guild::cuda {

template <GemmConfig C, OperandLoader Loader, class Epilogue>
  requires TileEpilogue<Epilogue, C.tile_n>
struct GroupedProduct {
  using Element = typename Loader::Element;
  using Work = typename Loader::Work;
  static constexpr GemmConfig config = C;

  struct Params {
    Work work;
    typename Loader::Params load;
    Epilogue epilogue;
  };

  static constexpr bool kReads = LoadsUnits<Epilogue>;
  static constexpr bool kLoadsBias = LoadsBias<Epilogue, C.tile_n>;
  static_assert(!(kReads && C.in_turns), "consumers that take turns cannot read a matrix");
  using Loop =
      MainLoop<C, Loader, std::conditional_t<stores_at_once<Epilogue, C.tile_n>(), int, unsigned>>;
  using Cursor = typename Loop::Cursor;
  using Sums = typename Loop::Sums;
  static constexpr bool kLoaderSchedules = Loader::kThreads == 128;
  using Tiles = TileQueue<4 * C.consumers + Loader::kThreads / 32>;
  struct BiasOfTile {
    alignas(16) char column[C.tile_n * kElementBytes];
  };
  struct NoBias {};
  struct SharedStorage {
    alignas(1024) char a[C.stages][C.a_bytes()];
    alignas(1024) char b[C.stages][C.b_bytes()];
    typename Epilogue::Storage epilogue[C.consumers];
    std::conditional_t<kLoadsBias, BiasOfTile, NoBias> bias[C.stages];  // the tile's first stage
    typename Loader::Storage loader;
    Barrier full[C.stages];     // Loader::kArrivals, and the bytes of TMA
    Barrier empty[C.stages];    // one arrival per consumer warp of the cluster that reads the stage
    Barrier turn[C.consumers];  // in_turns: this consumer may read the stages of its tile
    Barrier wanted;             // the loader requests the next tile from a separate scheduler warp
    Tiles tiles;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "too many stages for shared memory");

  static __device__ TileScheduler<Work, C> scheduler_of(Params const& p) {
    Work work = p.work;
    work.tile_m = C.cluster_m();  // compile-time powers of two: divisions become shifts
    work.tail_m = C.cluster == 2 ? C.tile_m : 0;
    work.band = kBand;
    return TileScheduler<Work, C>(work);
  }

  // The next tile is claimed this many steps before the end of a tile's sum, to hide the round trip
  // to global memory. A tile claimed earlier could have gone to a block that becomes free sooner.
  static constexpr int kClaimAhead = 8;

  static __device__ void produce(Params const& p, SharedStorage& smem, int thread) {
    Loader loader(p.load, smem.loader, thread);
    Cursor at;
    QueueEnd tiles;
    [[maybe_unused]] auto scheduler = scheduler_of(p);
    [[maybe_unused]] int const warp = warp_index();
    auto const want_next = [&] {
      if constexpr (kLoaderSchedules) {
        if (warp == 0) scheduler.announce(smem.tiles);
      } else {
        if (thread == 0) smem.wanted.arrive();
      }
    };
    if constexpr (kLoaderSchedules) want_next();
    for (Tile tile; smem.tiles.take(tiles, tile);) {
      int const count = Loop::steps(tile);
      loader.begin(tile);
      if (Work::kMayBeEmpty && count == 0) want_next();
      for (int step = 0; step < count; ++step, at.advance()) {
        if (count - step == min(count, kClaimAhead)) want_next();
        smem.empty[at.stage].wait(at.phase ^ 1);
        if constexpr (kLoadsBias) {
          bool const biased = step == 0 && thread == 0 && tile.rows > 0 && p.epilogue.has_bias();
          Barrier& full = smem.full[at.stage];
          char* const to = smem.bias[at.stage].column;
          if (biased) p.epilogue.template load_bias<C.tile_n>(tile, to, full);
        }
        loader.load(tile, step, smem.a[at.stage], smem.b[at.stage], smem.full[at.stage]);
      }
      if constexpr (kReads) {
        for (int unit = 0; unit < p.epilogue.units(tile); ++unit, at.advance()) {
          smem.empty[at.stage].wait(at.phase ^ 1);
          Barrier& full = smem.full[at.stage];
          if (thread == 0) p.epilogue.load(tile, unit, smem.b[at.stage], full);
          if constexpr (Loader::kArrivals > 1) full.arrive_when_copied();
        }
      }
    }
  }

  // pending: the stage that this thread's TMA stores may still be reading, -1 if none. The leader
  // of each warp waits for its own stores, then releases the stage for the warp.
  static __device__ void release_stored(int& pending, SharedStorage& smem, Self self) {
    if (self.leads_warp() && pending >= 0) {
      tma_store_wait<0>();
      Loop::release(smem.empty[pending]);
    }
    pending = -1;
  }

  // The epilogue of a ReadingEpilogue, one unit of 64 columns per stage: waits for the stage, turns
  // the unit's sums into results and stores them. Units rotate the storing thread among the warps;
  // its warp releases the stage one unit later, when the stores have read it. A unit's code is long
  // and must fit the instruction cache, so the loop is unrolled only kCopies times: a unit's sums
  // are always the first 32 accumulators, and the rest shift down by 32 after each unit.
  static __device__ void finish(Params const& p, float (&acc)[C.tile_n / 2], Cursor& at,
                                int& pending, Tile const& part, auto& state, SharedStorage& smem,
                                Self self) {
    int const share = self.group * kBlockBytes, units = p.epilogue.units(part);
#pragma unroll(Epilogue::kCopies)
    for (int unit = 0; unit < C.tile_n / 64; ++unit, at.advance()) {
      if (unit >= units) break;
      int const storer = unit % 4 * 32;
      smem.full[at.stage].wait(at.phase);
      p.epilogue.store_unit(acc, smem.a[at.stage] + share, smem.b[at.stage] + share, state, part,
                            unit, self.thread, storer, smem.epilogue[self.group]);
#pragma unroll
      for (int i = 0; i + 32 < C.tile_n / 2; ++i) acc[i] = acc[i + 32];
      release_stored(pending, smem, self);
      if (self.thread == storer) {
        pending = at.stage;
      } else if (self.leads_warp()) {
        Loop::release(smem.empty[at.stage]);
      }
    }
    p.epilogue.finish(state, part, self.thread);
  }

  // Initialises the accumulators if the epilogue has initial values; returns false if not, and the
  // sum starts at 0. A bias arrives with the tile's first stage, which this waits for.
  static __device__ bool start(Params const& p, Sums& acc, Tile const& tile, Cursor const& at,
                               SharedStorage& smem, Self self) {
#pragma unroll
    for (auto& part : acc) forget_registers(part);
    bool started = false;
    if constexpr (kLoadsBias) {
      if (!p.epilogue.has_bias()) return false;
      smem.full[at.stage].wait(at.phase);
      started = true;
    }
#pragma unroll
    for (auto& part : acc) {
      if constexpr (kLoadsBias) {
        fill_from<Element, C.tile_n>(smem.bias[at.stage].column, part, self.thread);
      } else {
        started = p.epilogue.template start<C.tile_n>(part, tile, self.thread);
      }
    }
    return started;
  }

  // The consumer loop of a StoringEpilogue. Stores that its Parcel defers overlap with the next
  // tile's products.
  static __device__ void consume_storing(Params const& p, SharedStorage& smem, Self self) {
    Sums acc;
    auto& storage = smem.epilogue[self.group];
    typename Epilogue::template Parcel<C.tile_n> parcel;
    Cursor at;
    QueueEnd tiles;
    Tile tile, following;
    bool more = smem.tiles.take(tiles, tile);
    // Tells the compiler that the loop runs at least once. The kernels were measured with the
    // resulting code.
    if (!stores_at_once<Epilogue, C.tile_n>() && !more) return;
    for (; more; tile = following) {
      Tile const part = row_block(tile, self.group);
      if (!Loop::kSkipsRows || part.rows > 0) {
        bool const started = start(p, acc, tile, at, smem, self);
        Loop::sum(acc, started, at, tile, smem, self, [&](int, bool takes) {
          if (takes) more = smem.tiles.take(tiles, following);
          if (parcel.left()) parcel.step(p.epilogue, storage, self.thread);
        });
      } else {
        Loop::pass(Loop::steps(tile), at, smem, self);
        more = smem.tiles.take(tiles, following);
      }
      // Drains the previous tile's stores, then begins this tile's; after the last tile, drains
      // those too. A loop, so that step() is inlined here only once.
      for (bool begun = false;; begun = true) {
        while (parcel.left()) parcel.step(p.epilogue, storage, self.thread);
        if (begun) break;
        parcel.begin(p.epilogue, acc[0], storage, part, self.thread);
        if (more) break;
      }
    }
  }

  // The consumer loop of a ReadingEpilogue. Its matrix follows the products through the ring.
  static __device__ void consume_reading(Params const& p, SharedStorage& smem, Self self) {
    static_assert(ReadingEpilogue<Epilogue, C.tile_n>);
    Sums acc;
    typename Epilogue::State state;
    auto& storage = smem.epilogue[self.group];
    p.epilogue.prepare(storage, self.thread);
    Cursor at;
    int pending = -1;
    QueueEnd tiles;
    Tile tile, following;
    for (bool more = smem.tiles.take(tiles, tile); more; tile = following) {
      Tile const rows = row_block(tile, self.group);
      if (rows.rows <= 0) {
        release_stored(pending, smem, self);
        Loop::pass(Loop::steps(tile) + p.epilogue.units(tile), at, smem, self);
        more = smem.tiles.take(tiles, following);
        continue;
      }
      p.epilogue.begin(state, rows, self.thread);
      bool const started = start(p, acc, tile, at, smem, self);
      auto const meanwhile = [&](int step, bool takes) {
        if (step == 0) release_stored(pending, smem, self);
        if (takes) more = smem.tiles.take(tiles, following);
      };
      if (p.epilogue.wants_side_sums(rows)) {
        int const rest = Loader::kClearsRest ? 64 : rows.rows;
        Loop::sum(acc, started, at, tile, smem, self, meanwhile,
                  p.epilogue.side_sums(storage, rows, rest, self.thread));
      } else {
        Loop::sum(acc, started, at, tile, smem, self, meanwhile);
      }
      finish(p, acc[0], at, pending, rows, state, smem, self);
    }
  }

  // The ping-pong consumer loop of a StoringEpilogue: each consumer takes every other tile, so that
  // one stores while the other multiplies. A consumer may wait for its tile's stages only after the
  // other has received the last stage of the previous tile: parity distinguishes only adjacent
  // phases, so no thread may wait more than one phase ahead.
  static __device__ void consume_in_turns(Params const& p, SharedStorage& smem, Self self) {
    static_assert(C.consumers == 2);
    auto& storage = smem.epilogue[self.group];
    Sums acc;
    Cursor at;
    QueueEnd tiles;
    Tile tile;
    if (self.group == 1) {
      if (!smem.tiles.take(tiles, tile)) return;
      at.advance(Loop::steps(tile));
    }
    uint32_t phase = self.group ^ 1;  // parity to wait for; consumer 0's first turn needs no wait
    while (smem.tiles.take(tiles, tile)) {
      smem.turn[self.group].wait(phase);
      bool const started = start(p, acc, tile, at, smem, self);
      phase ^= 1;
      // A tile of at most 64 rows has only the first part.
      if (Loop::kSkipsRows && tile.rows <= 64) {
        Loop::template sum<1>(acc, started, at, tile, smem, self, [](int, bool) {});
      } else {
        Loop::sum(acc, started, at, tile, smem, self, [](int, bool) {});
      }
#pragma unroll
      for (int i = 0; i < Loop::kParts; ++i) {
        typename Epilogue::template Parcel<C.tile_n> parcel;
        parcel.begin(p.epilogue, acc[i], storage, row_block(tile, i), self.thread);
        while (parcel.left()) parcel.step(p.epilogue, storage, self.thread);
      }
      if (!smem.tiles.take(tiles, tile)) break;
      at.advance(Loop::steps(tile));  // over the other consumer's tile
    }
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Self self) {
    if constexpr (kReads) {
      consume_reading(p, smem, self);
    } else if constexpr (C.in_turns) {
      consume_in_turns(p, smem, self);
    } else {
      consume_storing(p, smem, self);
    }
    if (self.leads_warp()) tma_store_wait<0>();  // shared memory must outlive the last store
  }

  // The scheduler, a warp that does not load. Announces tiles as the queue has room; where tiles
  // are claimed, each after the first when the loader requests it.
  static __device__ void schedule(Params const& p, SharedStorage& smem) {
    auto scheduler = scheduler_of(p);
    bool const claims = p.work.taken != nullptr;
    for (uint32_t phase = 0; scheduler.announce(smem.tiles); phase ^= 1) {
      if (claims) smem.wanted.wait(phase);
    }
  }

  static __device__ void sync() {
    if constexpr (C.cluster > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  static __device__ void run(Params const& p, SharedStorage& smem) {
    run(p, smem, [&](Self self) { consume(p, smem, self); });
  }

  // consumes(self): what a consumer does.
  template <class F>
  static __device__ void run(Params const& p, SharedStorage& smem, F&& consumes) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < C.stages; ++s) {
        smem.full[s].init(Loader::kArrivals);
        smem.empty[s].init(4 * (C.in_turns ? 1 : C.consumers) * C.cluster);
      }
      for (Barrier& turn : smem.turn) turn.init(4);
      smem.wanted.init(1);
      bool const tells = C.cluster > 1 && p.work.taken != nullptr && cluster_rank() == 0;
      smem.tiles.init(tells ? C.cluster : 0);
      fence_barrier_init();
    }
    sync();
    int const warp = warp_index();
    if (warp < 4) {
      shrink_registers<Loader::kRegisters>();
      if (warp < Loader::kThreads / 32) {
        produce(p, smem, threadIdx.x);
      } else if (!kLoaderSchedules && warp == Loader::kThreads / 32) {
        schedule(p, smem);
      }
    } else {
      grow_registers<168 + (168 - Loader::kRegisters) / C.consumers>();
      consumes(Self());
    }
    if constexpr (C.cluster > 1) sync();  // no block leaves while another may write to it
  }
};

// The entry point of every GroupedProduct and the kernels derived from it. nvcc 13.0 emits a host
// stub that does not compile for a kernel templated on a struct value whose type is in a namespace,
// so the kernel type carries its GemmConfig.
template <class Kernel>
__global__ __launch_bounds__(Kernel::config.threads(), 1) void run(
    __grid_constant__ typename Kernel::Params const p) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(p, *reinterpret_cast<typename Kernel::SharedStorage*>(smem));
}

}  // namespace guild::cuda
