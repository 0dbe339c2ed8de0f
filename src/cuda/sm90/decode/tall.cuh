// A grouped product for tens to hundreds of rows per expert, where reading weights takes about as
// long as multiplying.
//
// As in product.cuh, weights are wgmma's M and rows of X its N. A tile has up to 152 rows of X,
// rounded up to a multiple of 32 or to 152, so that an expert's weights are read once or a few
// times and little padding is multiplied. It serves few experts with many rows as well as many
// experts with few, which the host cannot tell apart. One accumulator sums K in order: results are
// bitwise those of sm90/kernel.cuh.
//
//   warp 0          loads weights by TMA; finds the block's tiles and queues them for the others
//   warps 1 .. 3    load rows of X: a gather by cp.async or, where they are packed, TMA (warp 1)
//   warps 4 .. 11   consumers: two warpgroups, each with 64 rows of each part of the weights
//
// A stage has two pieces of 128 rows of weights x 64 of K: side by side in a broad tile, two steps
// of K in a narrow one. There is one thread block per SM.
//
// Besides memory bandwidth, L2 bandwidth limits it: per byte of weights, a broad tile of r rows
// reads r / 256 bytes of X.
#pragma once
#include "cuda/alignment.h"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/products.h"
#include "cuda/sm90/cursor.cuh"
#include "cuda/sm90/decode/claims.h"
#include "cuda/sm90/decode/ring.cuh"
#include "cuda/sm90/decode/tall_results.cuh"
#include "cuda/sm90/decode/tall_tiles.h"
#include "cuda/sm90/tile_queue.cuh"
// Must follow copy.cuh, which includes what this header lacks.
#include <cute/arch/mma_sm90_gmma_ext.hpp>

namespace guild::cuda {

#define GUILD_TALL_INSTRUCTION(T, n, types)                                                  \
  template <Major a, Major b>                                                                \
  struct MmaInstruction<T, n, a, b> {                                                        \
    using type =                                                                             \
        cute::SM90::GMMA::MMA_64x##n##x16_##types##_SS<a, b, cute::SM90::GMMA::ScaleIn::One, \
                                                       cute::SM90::GMMA::ScaleIn::One>;      \
  };
GUILD_TALL_INSTRUCTION(__nv_bfloat16, 96, F32BF16BF16)
GUILD_TALL_INSTRUCTION(__half, 96, F32F16F16)
GUILD_TALL_INSTRUCTION(__nv_bfloat16, 152, F32BF16BF16)
GUILD_TALL_INSTRUCTION(__half, 152, F32F16F16)
#undef GUILD_TALL_INSTRUCTION

}  // namespace guild::cuda

namespace guild::cuda::sm90 {

// As `claimed` of numbers.cuh.
[[maybe_unused]] static __device__ int32_t tall_claimed[kClaimCounters];

// One slice's products of n rows of X.
template <class T, int n>
__device__ inline void mma_rows(float (&acc)[kPartSums], uint32_t a, uint32_t b, bool accumulate) {
  using namespace cute::SM90::GMMA;
  using Instruction = typename MmaInstruction<T, n, Major::K, Major::K>::type;
  [&]<size_t... i>(std::index_sequence<i...>) {
    Instruction::fma(whole_descriptor(a), whole_descriptor(b), acc[i]...,
                     accumulate ? ScaleOut::One : ScaleOut::Zero);
  }(std::make_index_sequence<n / 2>{});
}

// Loads groups of eight rows: eights_map() in stage_map.h.
__device__ inline void tma_load_eights(CUtensorMap const& map, void* to, int k, int eight,
                                       int expert, Barrier& done, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(k), "r"(0), "r"(eight), "r"(expert),
      "l"(policy)
      : "memory");
}

template <class T, bool gathered, bool activates, bool plain>
struct TallProduct {
  static constexpr int kThreads = 384, kConsumerWarps = 8, kGatherThreads = 96;
  static constexpr int kStages = 4, kWeightBytes = 128 * kRowBytes;
  static constexpr int kArrivals = 1 + (gathered ? kGatherThreads : 1);
  static constexpr int kMostGroups = kMostRouted, kLeastColumns = activates ? 64 : 128;

  struct Params {
    Groups groups;
    int columns, k;    // columns: of D or A
    int narrow_up_to;  // of TallTiles
    bool early;        // as in product.cuh
    CUtensorMap weight;
    int32_t const* expert_at;  // which matrix is an expert's; null: they are in order
    T const* x;                // gathered: (tokens, k)
    uint32_t stride;
    int32_t const* row_token;
    int tokens;
    CUtensorMap x_map[2];  // else: (k, 1, rows), boxes of 64 x 1 x 32 and of 64 x 1 x 8
    int claims;            // which of `tall_claimed` is this launch's; -1: every n-th tile
    TallResults<T, activates, plain> results;
  };

  using Cursor = cuda::Cursor<kStages, int>;
  struct Stage {
    alignas(1024) char weight[2][kWeightBytes];
    char x[kTallRows * kRowBytes];
  };
  struct SharedStorage {
    Stage stage[kStages];
    typename TallResults<T, activates, plain>::Storage results;
    Barrier full[kStages], empty[kStages];
    TileQueue<kConsumerWarps + (gathered ? 3 : 1)> queue;
    int bound[kMostGroups + 1];  // where groups begin and end
  };
  static constexpr int kBytes = int(sizeof(SharedStorage));
  static_assert(kBytes <= 227 * 1024);

  static __device__ void start_in_turn() {
    wait_for_previous();
    let_next_start();
  }
  static __device__ bool is_broad(Tile const& tile) { return tile.apart; }
  // How deep a tile's stages are in K, and how many of them there are.
  static __device__ int depth(Tile const& tile) { return is_broad(tile) ? 64 : 128; }
  static __device__ int stages_of(Params const& p, Tile const& tile) {
    return (p.k + depth(tile) - 1) / depth(tile);
  }

  // Reads the groups' bounds.
  static __device__ void find_groups(Params const& p, SharedStorage& smem) {
    if (threadIdx.x == 0) smem.bound[0] = p.groups.start(0);
    for (int g = threadIdx.x; g < p.groups.groups; g += kThreads) {
      smem.bound[g + 1] = p.groups.bound(g);
    }
  }

  // The next tile is claimed, then looked up, when this many stages of the current one are left.
  static constexpr int kAskedAhead = 5, kFoundAhead = 3;

  static __device__ void load_weights(Params const& p, Stage& stage, Barrier& full,
                                      Tile const& tile, int expert, int index, uint64_t policy) {
    full.arrive_expect(2 * kWeightBytes);
    bool const broad = is_broad(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const k = depth(tile) * index + (broad ? 0 : 64 * i);
      int const col = tile.col + (broad ? i * p.results.part_columns() : 0);
      tma_load_eights(p.weight, stage.weight[i], k, col / 8, expert, full, policy);
    }
  }

  // The weight-loading warp. Announces the block's tiles, each a little ahead.
  static __device__ void load(Params const& p, SharedStorage& smem) {
    bool const leads = threadIdx.x % 32 == 0;
    uint64_t const policy = evict_first();
    Groups const groups{smem.bound + 1, p.groups.groups, p.groups.total, /*has_start=*/true};
    TileFinder<TallTiles> finder({groups, p.results.part_columns(), p.columns, p.narrow_up_to},
                                 blockIdx.x, 0);
    Cursor at;
    QueueEnd end;
    Tile tile, next;
    bool waits = p.early, more = finder.next(next);
    auto const announce = [&] {
      if (!more) next.expert = -1;
      smem.queue.wait_for_free(end);
      smem.queue.put(end, next);
    };
    announce();
    for (int number = blockIdx.x, after = 0; more;) {
      tile = next;
      int const count = stages_of(p, tile), e = placed(p.expert_at, tile.expert);
      int asks_at = max(0, count - kAskedAhead), finds_at = max(0, count - kFoundAhead);
      // Claiming must wait for the preceding kernel, so fill the ring first.
      if (waits) asks_at = finds_at = max(finds_at, min(count, kStages) - 1);
      for (int i = 0; i < count; ++i, at.advance()) {
        smem.empty[at.stage].wait(at.phase ^ 1);
        if (leads) load_weights(p, smem.stage[at.stage], smem.full[at.stage], tile, e, i, policy);
        if (i == asks_at) {
          if (waits && p.claims >= 0) wait_for_previous();
          waits = waits && p.claims < 0;
          after = number + int(gridDim.x);
          if (p.claims >= 0 && leads) {
            after = int(gridDim.x) + atomicAdd(&tall_claimed[p.claims], 1);
          }
        }
        if (i != finds_at) continue;
        number = __shfl_sync(~0u, after, 0);
        finder.go_to(number);
        more = finder.next(next);
        // Each block that had a first tile fails exactly once: there are as many claims as tiles.
        if (!more && p.claims >= 0 && number == int(gridDim.x) + finder.count() - 1) {
          tall_claimed[p.claims] = 0;
        }
        announce();
      }
    }
  }

  // The three gathering warps. Each takes every third group of eight rows; a lane copies 16 bytes,
  // an eighth of a step's row, of two rows in each group.
  static __device__ void gather(Params const& p, SharedStorage& smem) {
    if (p.early) wait_for_previous();
    int const warp = warp_index() - 1, lane = threadIdx.x % 32;
    Cursor at;
    QueueEnd end;
    for (Tile tile; smem.queue.take(end, tile);) {
      uint32_t from[kLaneRows];
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        int const r = 8 * (warp + i / 2 * 3) + i % 2 * 4 + lane / 8;
        int const token = r < tile.rows ? p.row_token[tile.row + r] : -1;
        from[i] = unsigned(token) < unsigned(p.tokens) ? uint32_t(token) * p.stride : kNone;
      }
      int const rows = tile.rows, count = stages_of(p, tile);
      for (int i = 0; i < count; ++i, at.advance()) {
        smem.empty[at.stage].wait(at.phase ^ 1);
        uint32_t const to = shared_address(smem.stage[at.stage].x) + warp * 8 * kRowBytes;
        int const k = depth(tile) * i + lane % 8 * kElementsPer16Bytes;
        copy_rows(p, to, from, rows - 8 * warp, k);
        if (!is_broad(tile)) {
          copy_rows(p, to + kNarrowRows * kRowBytes, from, rows - 8 * warp, k + 64);
        }
        smem.full[at.stage].arrive_when_copied();
      }
    }
  }
  static constexpr int kLaneRows = (kTallRows / 8 + 2) / 3 * 2;
  static __device__ void copy_rows(Params const& p, uint32_t to, uint32_t const (&from)[kLaneRows],
                                   int rows, int k) {
    int const lane = threadIdx.x % 32;
    uint32_t const none = k < p.k ? kNone : 0;
    uint32_t const upper = chunk_address(to, lane / 8, lane % 8);
    uint32_t const lower = chunk_address(to, lane / 8 + 4, lane % 8);
#pragma unroll
    for (int i = 0; i < kLaneRows; i += 2) {
      int const row = i / 2 * 24;
      if (row >= rows) break;
      copy_async(upper + row * kRowBytes, units_after(p.x + k, from[i]), from[i] < none);
      copy_async(lower + row * kRowBytes, units_after(p.x + k, from[i + 1]), from[i + 1] < none);
    }
  }

  // One warp, where rows of X are packed: boxes of 32 rows, then of 8.
  static __device__ void load_rows(Params const& p, SharedStorage& smem) {
    if (p.early) wait_for_previous();
    int const lane = threadIdx.x % 32;
    Cursor at;
    QueueEnd end;
    for (Tile tile; smem.queue.take(end, tile);) {
      int const rows = loaded_rows(tile), large = rows / 32, boxes = large + rows % 32 / 8;
      int const steps = depth(tile) / 64, count = stages_of(p, tile);
      int const step = lane / boxes, box = lane % boxes;
      int const row = box < large ? 32 * box : 32 * large + 8 * (box - large);
      CUtensorMap const& map = p.x_map[box >= large];
      for (int i = 0; i < count; ++i, at.advance()) {
        Barrier& full = smem.full[at.stage];
        smem.empty[at.stage].wait(at.phase ^ 1);
        if (lane == 0) full.arrive_expect(steps * rows * kRowBytes);
        __syncwarp();
        if (step < steps) {
          tma_load(map, smem.stage[at.stage].x + (step * kNarrowRows + row) * kRowBytes,
                   {depth(tile) * i + 64 * step, 0, tile.row + row}, full);
        }
      }
    }
  }

  // The sums of a tile over K, `rows` of X.
  template <int rows, bool broad>
  static __device__ void sum(TallSums& acc, bool started, Cursor& at, int count,
                             SharedStorage& smem, int group) {
    bool const leads = threadIdx.x % 32 == 0;
    uint32_t const stage0 = kept(shared_address(smem.stage));
    int i = 0;
#pragma unroll 1
    do {
      smem.full[at.stage].wait(at.phase);
      uint32_t const base = stage0 + at.stage * uint32_t(sizeof(Stage));
      uint32_t const a = descriptor<Major::K>(base + group * kBlockBytes);
      uint32_t const b = descriptor<Major::K>(base + 2 * kWeightBytes);
      fence(acc);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < (broad ? 4 : 8); ++slice) {
        int const moved = slice % 4 * kSliceBytes<Major::K> / 16;
        bool const adds = started || i > 0 || slice > 0;
        if constexpr (broad) {
          mma_rows<T, rows>(acc[0], a + moved, b + moved, adds);
          mma_rows<T, rows>(acc[1], a + moved + kWeightBytes / 16, b + moved, adds);
        } else {
          mma_rows<T, rows>(acc[0], a + moved + slice / 4 * kWeightBytes / 16,
                            b + moved + slice / 4 * kNarrowRows * kRowBytes / 16, adds);
        }
      }
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        if (leads) smem.empty[at.before(1)].arrive();
      }
      at.advance();
    } while (++i < count);
    wgmma_wait<0>();
    fence(acc);
    if (leads) smem.empty[at.before(1)].arrive();
  }
  static __device__ void fence(TallSums& acc) {
    fence_registers(acc[0]);
    fence_registers(acc[1]);
  }

  static __device__ void consume(Params const& p, SharedStorage& smem) {
    if (p.early) start_in_turn();
    int const group = warp_index() / 4 - 1, thread = threadIdx.x % 128;
    Cursor at;
    QueueEnd end;
    TallSums acc;
    int turn = 0;
    for (Tile tile; smem.queue.take(end, tile);) {
      forget_registers(acc[0]);
      forget_registers(acc[1]);
      bool const broad = is_broad(tile),
                 started = !plain && p.results.start(acc, tile, group, thread);
      int const count = stages_of(p, tile);
      if (!broad && tile.rows <= 32) {
        sum<32, false>(acc, started, at, count, smem, group);
      } else if (!broad) {
        sum<64, false>(acc, started, at, count, smem, group);
      } else if (tile.rows <= 64) {
        sum<64, true>(acc, started, at, count, smem, group);
      } else if (tile.rows <= 96) {
        sum<96, true>(acc, started, at, count, smem, group);
      } else if (tile.rows <= 128) {
        sum<128, true>(acc, started, at, count, smem, group);
      } else {
        sum<kTallRows, true>(acc, started, at, count, smem, group);
      }
      p.results.store(acc, tile, broad, smem.results, turn, group, thread);
    }
    if (thread == 0) tma_store_wait<0>();  // shared memory must outlive the last store
  }

  static __device__ void run(Params const& p) {
    extern __shared__ __align__(1024) char memory[];
    auto& smem = *reinterpret_cast<SharedStorage*>(memory);
    if (threadIdx.x == 0) {
      prefetch(p.weight);
      if (!gathered) {
        prefetch(p.x_map[0]);
        prefetch(p.x_map[1]);
      }
      for (int i = 0; i < kStages; ++i) {
        smem.full[i].init(kArrivals);
        smem.empty[i].init(kConsumerWarps);
      }
      smem.queue.init(0);
      fence_barrier_init();
    }
    if (!p.early) start_in_turn();
    find_groups(p, smem);
    __syncthreads();
    int const warp = warp_index();
    if (warp < 4) {
      shrink_registers<40>();
      if (warp == 0) {
        load(p, smem);
      } else if constexpr (gathered) {
        gather(p, smem);
      } else if (warp == 1) {
        load_rows(p, smem);
      }
    } else {
      grow_registers<232>();
      consume(p, smem);
    }
  }
};

}  // namespace guild::cuda::sm90
