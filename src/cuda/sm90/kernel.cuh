// D[group] = epilogue(A[group] B[group]^T) for every group, in one persistent launch.
//
//   warpgroup 0      producer: fills a ring of stages, 64 deep each (loaders.cuh); a warp of it
//                    finds the tiles and tells the others (tile_queue.cuh), see kGuideLoads
//   warpgroups 1..   consumers: wgmma into registers, then the epilogue, 64 rows of a tile each
//                    or, in turns, every other tile whole
//
// An epilogue that reads a matrix of its own gets it through the same ring, 64 columns of the tile
// a stage, behind the tile's last products: it needs no memory besides and is asked for in time.
// Other results leave while the next tile's products run.
//
// The blocks of a cluster work on row tiles of one group that are neighbours and bring each other a
// share of B: a stage is filled for all of them, and free when the consumers of all have read it.
// Where a group's rows leave but one row tile, they take two of its columns, each with a B of its
// own.
//
// Ragged tiles over packed tokens: SonicMoE (arXiv:2512.14080). Warp roles: CUTLASS.
#pragma once
#include "cuda/sm90/column_sums.cuh"
#include "cuda/sm90/cursor.cuh"
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/loaders.cuh"
#include "cuda/sm90/tile_queue.cuh"

namespace guild::cuda {

template <class Element, GemmConfig C, class Loader, class Work, class Epilogue>
struct GroupedProduct {
  static constexpr GemmConfig config = C;

  struct Params {
    Work work;
    typename Loader::Params load;
    Epilogue epilogue;
  };

  static constexpr bool kReads = requires { typename Epilogue::State; };
  static constexpr bool kBeside = requires { typename Epilogue::template Parcel<C.tile_n>; };
  // Blocks that take tiles as they go take none sooner than they can use it.
  static constexpr bool kTakenLate = C.cluster > 1 || kOrders<Work>;
  static constexpr bool kGuideLoads = Loader::kThreads == 128 || kTakenLate;  // else an idle warp
  using Tiles = TileQueue<4 * C.consumers + Loader::kThreads / 32>;
  struct SharedStorage {
    alignas(1024) char a[C.stages][C.a_bytes()];
    alignas(1024) char b[C.stages][C.b_bytes()];
    typename Epilogue::Storage epilogue[C.consumers];
    typename Loader::Storage loader;
    Barrier full[C.stages];     // Loader::kArrivals, and the bytes of TMA
    Barrier empty[C.stages];    // one arrival per consumer warp of the cluster that reads the stage
    Barrier turn[C.consumers];  // in turns: this consumer may take its tile's stages
    Tiles tiles;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "too many stages for shared memory");

  using Cursor = cuda::Cursor<C.stages, std::conditional_t<kReads || kBeside, unsigned, int>>;

  static __device__ TileGuide<Work, C> guide_of(Params const& p) {
    Work work = p.work;
    work.tile_m = C.cluster_m();  // constants, so that the walk divides by shifting
    work.tail_m = C.cluster == 2 ? C.tile_m : 0;
    work.band = kBand;
    return TileGuide<Work, C>(work);
  }

  static __device__ void release(Barrier& empty) {
    if constexpr (C.cluster == 1) {
      empty.arrive();
    } else {
      for (int block = 0; block < C.cluster; ++block) empty.arrive_at(block);
    }
  }
  static __device__ int steps(Tile const& tile) { return (tile.inner + C.tile_k - 1) / C.tile_k; }

  // Steps before the next tile's at which it is taken late, for that is a trip to memory.
  static constexpr int kAhead = 8;

  static __device__ void produce(Params const& p, SharedStorage& smem, int thread) {
    Loader loader(p.load, smem.loader, thread);
    Cursor at;
    QueueEnd tiles;
    [[maybe_unused]] auto guide = guide_of(p);
    [[maybe_unused]] int const warp = warp_index();
    auto const announce = [&] {
      if constexpr (kGuideLoads) {
        if (warp == 0) guide.announce(smem.tiles);
      }
    };
    announce();
    for (Tile tile; smem.tiles.take(tiles, tile);) {
      int const count = steps(tile), next = kTakenLate ? max(count - kAhead, 0) : 0;
      loader.begin(tile);
      if (Work::kMayBeEmpty && count == 0) announce();
      for (int step = 0; step < count; ++step, at.advance()) {
        if (step == next) announce();
        smem.empty[at.stage].wait(at.phase ^ 1);
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

  struct Self {  // a thread of a consumer
    int group;   // which consumer, known to the compiler as the same for all lanes of a warp
    int thread;  // of its 128
    __device__ Self() : group(warp_index() / 4 - 1), thread(threadIdx.x % 128) {}
    __device__ bool leads_warp() const { return thread % 32 == 0; }
  };

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
  // meanwhile(step, takes the next tile): beside each step's products, once where there are none.
  // aside: products of its own on each step's A.
  template <class F, class Aside = NothingAside>
  static __device__ void sum(Accumulator& acc, bool started, Cursor& at, Tile const& tile,
                             SharedStorage& smem, Self self, F&& meanwhile, Aside aside = {}) {
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
    // At least one step, or the compiler would not know that products define the accumulators.
    int step = 0;
    do {
      // What cp.async wrote needs no proxy fence after this, as in CUTLASS's own such main loop. A
      // fence would wait for the arrival below at the other block: 150 to 350 cycles a step.
      Barrier::wait_at(full + at.stage * sizeof(Barrier), at.phase);
      fence(acc);
      aside.start(shared_address(smem.a[at.stage]) + first);
      multiply(acc, a + at.stage * (C.a_bytes() / 16), b + at.stage * (C.b_bytes() / 16),
               started || step > 0);
      if (step > 0) {
        wgmma_wait<1>();
        if (self.leads_warp()) release(smem.empty[at.before(1)]);
      }
      aside.finish(step);
      meanwhile(step, kTakenLate ? step + 1 == count : step == 0);
      at.advance();
    } while (++step < count);
    if (C.in_turns && self.leads_warp()) smem.turn[1 - self.group].arrive();
    wgmma_wait<0>();
    fence(acc);
    if (self.leads_warp()) release(smem.empty[at.before(1)]);
  }

  // lent: the stage that stores still read, -1 if none; a warp's first thread keeps it until the
  // stores that it has issued are through.
  static __device__ void take_back(int& lent, SharedStorage& smem, Self self) {
    if (self.leads_warp() && lent >= 0) {
      tma_store_wait<0>();
      release(smem.empty[lent]);
    }
    lent = -1;
  }

  // The epilogue, fed by the ring. Stage by stage: wait, turn 64 columns into results, store. One
  // thread stores, of another warp each time; its warp frees the stage when the stores have read
  // it, at the next one. Where the code of a unit is long, there is one copy of it, at which the
  // accumulators pass by: more would outgrow the instruction cache.
  static __device__ void finish(Params const& p, float (&acc)[C.tile_n / 2], Cursor& at, int& lent,
                                Tile const& part, auto& state, SharedStorage& smem, Self self) {
    int const share = self.group * kBlockBytes, units = p.epilogue.units(part);
#pragma unroll(Epilogue::kCopies)
    for (int unit = 0; unit < C.tile_n / 64; ++unit, at.advance()) {
      if (unit >= units) break;
      int const storer = unit % 4 * 32;
      smem.full[at.stage].wait(at.phase);
      if (part.rows > 0) {
        p.epilogue.store_unit(acc, smem.a[at.stage] + share, smem.b[at.stage] + share, state, part,
                              unit, self.thread, storer, smem.epilogue[self.group]);
      }
#pragma unroll
      for (int i = 0; i + 32 < C.tile_n / 2; ++i) acc[i] = acc[i + 32];
      take_back(lent, smem, self);
      if (self.thread == storer) {
        lent = at.stage;
      } else if (self.leads_warp()) {
        release(smem.empty[at.stage]);
      }
    }
    if (part.rows > 0) p.epilogue.finish(state, part, self.thread);
  }

  // What the sum begins with, if anything.
  static __device__ bool start(Params const& p, Accumulator& acc, Tile const& tile, Self self) {
    bool started = false;
#pragma unroll
    for (auto& part : acc) {
      forget_registers(part);
      started = p.epilogue.template start<C.tile_n>(part, tile, self.thread);
    }
    return started;
  }

  // What a parcel keeps of a tile is done beside the next one's products, a piece a step.
  static __device__ void consume_beside(Params const& p, Accumulator& acc, SharedStorage& smem,
                                        Self self) {
    auto& storage = smem.epilogue[self.group];
    typename Epilogue::template Parcel<C.tile_n> parcel;
    Cursor at;
    QueueEnd tiles;
    Tile tile, following;
    bool more = smem.tiles.take(tiles, tile);
    if (!more) return;
    do {
      bool const started = start(p, acc, tile, self);
      sum(acc, started, at, tile, smem, self, [&](int, bool takes) {
        if (takes) more = smem.tiles.take(tiles, following);
        if (parcel.left()) parcel.step(p.epilogue, storage, self.thread);
      });
      for (bool begun = false;; begun = true) {
        while (parcel.left()) parcel.step(p.epilogue, storage, self.thread);
        if (begun) break;
        parcel.begin(p.epilogue, acc[0], storage, part_of(tile, self.group), self.thread);
        if (more) break;
      }
      tile = following;
    } while (more);
  }

  // The epilogue follows the products.
  static __device__ void consume_whole(Params const& p, Accumulator& acc, SharedStorage& smem,
                                       Self self) {
    Cursor at;
    QueueEnd tiles;
    Tile tile, following;
    for (bool more = smem.tiles.take(tiles, tile); more; tile = following) {
      bool const started = start(p, acc, tile, self);
      sum(acc, started, at, tile, smem, self, [&](int, bool takes) {
        if (takes) more = smem.tiles.take(tiles, following);
      });
      Tile const rows = part_of(tile, self.group);
      if (rows.rows > 0) p.epilogue.template store<C.tile_n>(acc[0], rows, self.thread);
    }
  }

  // The same, fed by the ring.
  static __device__ void consume_reading(Params const& p, Accumulator& acc, SharedStorage& smem,
                                         Self self) {
    typename Epilogue::State state;
    auto& storage = smem.epilogue[self.group];
    p.epilogue.prepare(storage, self.thread);
    Cursor at;
    int lent = -1;
    QueueEnd tiles;
    Tile tile, following;
    for (bool more = smem.tiles.take(tiles, tile); more; tile = following) {
      Tile const rows = part_of(tile, self.group);
      p.epilogue.begin(state, rows, self.thread);
      bool const started = start(p, acc, tile, self);
      auto const meanwhile = [&](int step, bool takes) {
        if (step == 0) take_back(lent, smem, self);
        if (takes) more = smem.tiles.take(tiles, following);
      };
      if (p.epilogue.weighs(rows)) {
        int const rest = Loader::kClearsRest ? 64 : rows.rows;
        sum(acc, started, at, tile, smem, self, meanwhile,
            p.epilogue.weigh(storage, rows, rest, self.thread));
      } else {
        sum(acc, started, at, tile, smem, self, meanwhile);
      }
      finish(p, acc[0], at, lent, rows, state, smem, self);
    }
  }

  // A consumer takes its tile's stages when the other has the last of the tile before: a barrier's
  // parity tells neighbouring phases apart only.
  static __device__ void consume_in_turns(Params const& p, Accumulator& acc, SharedStorage& smem,
                                          Self self) {
    static_assert(C.consumers == 2);
    auto& storage = smem.epilogue[self.group];
    Cursor at;
    QueueEnd tiles;
    Tile tile;
    if (self.group == 1) {
      if (!smem.tiles.take(tiles, tile)) return;
      at.advance(steps(tile));
    }
    uint32_t phase = self.group ^ 1;  // of the barrier to wait at: the first's first is past
    while (smem.tiles.take(tiles, tile)) {
      bool const started = start(p, acc, tile, self);
      smem.turn[self.group].wait(phase);
      phase ^= 1;
      sum(acc, started, at, tile, smem, self, [](int, bool) {});
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        typename Epilogue::template Parcel<C.tile_n> parcel;
        parcel.begin(p.epilogue, acc[i], storage, part_of(tile, i), self.thread);
        while (parcel.left()) parcel.step(p.epilogue, storage, self.thread);
      }
      if (!smem.tiles.take(tiles, tile)) break;
      at.advance(steps(tile));  // the other's
    }
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Self self) {
    Accumulator acc;
    if constexpr (C.in_turns) {
      consume_in_turns(p, acc, smem, self);
    } else if constexpr (kBeside) {
      consume_beside(p, acc, smem, self);
    } else if constexpr (kReads) {
      consume_reading(p, acc, smem, self);
    } else {
      consume_whole(p, acc, smem, self);
    }
    if (self.leads_warp()) tma_store_wait<0>();  // shared memory must outlive the last store
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
      } else if (!kGuideLoads && warp == Loader::kThreads / 32) {
        auto guide = guide_of(p);
        while (guide.announce(smem.tiles)) {
        }
      }
    } else {
      grow_registers<168 + (168 - Loader::kRegisters) / C.consumers>();
      consume(p, smem, Self());
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
