// A grouped product for few tokens: bound by reading each weight once, from memory.
//
// Operands are swapped: 64 rows of a weight are wgmma's M, the rows of X are its N, 8 to 64 of
// them. A block has one producer warp, which streams weights through a deep ring of stages without
// ever waiting for a tile to end, and one warpgroup that multiplies and stores. K is summed in
// order by one accumulator, in slices of 16, so that results have the bits of sm90/kernel.cuh.
//
//   warps 0 .. 3   consumers
//   warp 4         producer: weights by TMA; X gathered by cp.async, or by TMA where rows lie
//   packed
//
// Swapped operands: DeepGEMM, vLLM (docs/papers.md).
#pragma once
#include "cuda/products.h"
#include "cuda/sm90/arch/copy.cuh"
#include "cuda/sm90/decode/plan.cuh"
#include "cuda/sm90/decode/results.cuh"
#include "cuda/sm90/decode/ring.cuh"
#include "cuda/sm90/tile_queue.cuh"

namespace guild::cuda::sm90 {

template <class T, DecodeShape S, Major major, bool gathered, bool activates>
struct DecodeProduct {
  static constexpr int kThreads = kPlanThreads;
  static constexpr int kArrivals = gathered ? 33 : 1;

  struct Params {
    PlanArgs plan;
    CUtensorMap weight[2];        // boxes of 64 x 64, or of 32 rows with kHalfBoxes
    int32_t const* expert_at[2];  // the third coordinate of each map; null: the expert itself
    bool halves;                  // weight[1] has the same rows of up; else the rows that follow
    int across, rows, k;          // tiles side by side; rows of X and of the results
    // The weights and the plan's input were complete when the kernel before this one let it start.
    bool early;
    T const* x;  // gathered: (tokens, k)
    uint32_t stride;
    int32_t const* row_token;
    int tokens;
    CUtensorMap x_map;  // else: (k, 1, rows), boxes of 64 x 1 x 8
    DecodeResults<T, S.parts, activates> results;
  };

  // Whether gate and up share a block.
  static constexpr bool kHalfBoxes = activates && S.parts == 1;
  static_assert(!kHalfBoxes || major == Major::K);

  using Ring = sm90::Ring<T, S, major>;
  using Stage = typename Ring::Stage;
  using Cursor = typename Ring::Cursor;
  static constexpr int kStages = Ring::kStages;
  struct SharedStorage {
    Ring ring;
    typename DecodeResults<T, S.parts, activates>::template Storage<S.tokens> results;
    Planner planner;
  };
  static_assert(sizeof(SharedStorage) <= 226 * 1024 / kAtOnce, "too many stages");

  // What the next kernel may rely on before it waits: all kernels before this one have completed.
  static __device__ void start_in_turn() {
    wait_for_previous();
    let_next_start();
  }

  static __device__ RowTiles work_of(Params const& p, Plan const& plan) {
    constexpr int width = 64 * S.parts;
    return {.groups = plan.groups(p.rows),
            .tile_n = p.halves ? width / 2 : width,
            .across = p.across,
            .inner = p.k,
            .tile_m = S.tokens,
            .tail_m = 0,
            .band = 1};  // the tiles that share weights follow each other
  }
  static __device__ int stages_of(Params const& p) {
    return (p.k + 64 * S.steps() - 1) / (64 * S.steps());
  }
  // Rows that are loaded and multiplied for a tile.
  static __device__ int width_of(Tile const& tile) {
    return tile.rows <= 8 ? 8 : tile.rows <= 16 ? 16 : tile.rows <= 32 ? 32 : 64;
  }

  // One thread: announces a stage's bytes and issues its weights.
  static __device__ void load_weights(Params const& p, Stage& stage, Barrier& full, int expert,
                                      Tile const& tile, int index) {
    uint64_t const policy = evict_first();
    int const of_x = gathered ? 0 : S.steps() * width_of(tile) * kRowBytes;
    full.arrive_expect(DecodeShape::kStageWeights + of_x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const k = 64 * (index * S.steps() + (S.parts == 1 ? i : 0));
      auto const load = [&](bool second, int rows, char* to) {
        int const row = tile.col + (second && !p.halves ? rows : 0);
        int const e = placed(p.expert_at[second], expert);
        Coordinate const at = major == Major::K ? Coordinate{k, row, e} : Coordinate{row, k, e};
        tma_load_once(p.weight[second], to, at, full, policy);
      };
      if constexpr (kHalfBoxes) {
        load(false, 32, stage.weight[i]);
        load(true, 32, stage.weight[i] + kBlockBytes / 2);
      } else {
        load(S.parts == 2 && i == 1, 64, stage.weight[i]);
      }
    }
  }

  // Where a lane's rows of X begin: row lane / 8 + 4 i of the tile.
  struct Rows {
    static constexpr int kMost = S.tokens / 4;
    uint32_t from[kMost];
    int token[kMost];

    // Starts to load what begin() will need: memory that is busy answers late.
    __device__ void find(Params const& p, Plan const& plan, Tile const& tile) {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        int const r = threadIdx.x % 32 / 8 + 4 * i;
        token[i] = -1;
        if (r >= tile.rows) continue;
        token[i] = plan.token != nullptr ? plan.token[tile.row + r] : p.row_token[tile.row + r];
      }
    }
    __device__ void begin(Params const& p) {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        from[i] = unsigned(token[i]) < unsigned(p.tokens) ? uint32_t(token[i]) * p.stride : kNone;
      }
    }
    __device__ void load(Params const& p, Stage& stage, Tile const& tile, int index) const {
      int const lane = threadIdx.x % 32, width = width_of(tile);
#pragma unroll
      for (int s = 0; s < S.steps(); ++s) {
        int const k = 64 * (index * S.steps() + s) + lane % 8 * kElementsPer16Bytes;
        uint32_t const none = k < p.k ? kNone : 0, to = shared_address(stage.x[s]);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
          if (4 * i >= width) break;
          copy_async(chunk_address(to, lane / 8 + 4 * i, lane % 8), units_after(p.x + k, from[i]),
                     from[i] < none);
        }
      }
    }
  };

  static __device__ void gather(Params const& p, Rows const& rows, Stage& stage, Barrier& full,
                                Tile const& tile, int index) {
    rows.load(p, stage, tile, index);
    full.arrive_when_copied();
  }

  // Where rows of X lie packed: boxes of 8 rows, one a lane.
  static __device__ void load_rows(Params const& p, Stage& stage, Barrier& full, Tile const& tile,
                                   int index) {
    int const lane = threadIdx.x % 32, boxes = width_of(tile) / 8;
    if (lane >= boxes * S.steps()) return;
    int const step = lane / boxes, box = lane % boxes;
    tma_load(p.x_map, stage.x[step] + box * 8 * kRowBytes,
             {64 * (index * S.steps() + step), 0, tile.row + 8 * box}, full);
  }

  // Fills the ring with weights, ahead of X, which the kernel before is still making; returns the
  // number of stages.
  static __device__ int fill_early(Params const& p, Ring& ring, Plan const& plan) {
    int const count = stages_of(p);
    int filled = 0;
    TileFinder<RowTiles> finder(work_of(p, plan), blockIdx.x, gridDim.x);
    for (Tile tile; filled < kStages && finder.next(tile);) {
      for (int i = 0; i < count && filled < kStages; ++i, ++filled) {
        if (threadIdx.x % 32 != 0) continue;
        load_weights(p, ring.stage[filled], ring.full[filled], plan.expert[tile.expert], tile, i);
      }
    }
    wait_for_previous();
    return filled;
  }

  static __device__ void produce(Params const& p, Ring& ring, Plan const& plan) {
    int ahead = p.early ? fill_early(p, ring, plan) : 0;  // stages whose weights are under way
    int const lane = threadIdx.x % 32, count = stages_of(p);
    int filled = 0;  // stages of the first round
    TileFinder<RowTiles> finder(work_of(p, plan), blockIdx.x, gridDim.x);
    Cursor at;
    Rows rows;
    Tile tile, next;
    bool more = finder.next(next);
    if constexpr (gathered) {
      if (more) rows.find(p, plan, next);
    }
    while (more) {
      tile = next;
      more = finder.next(next);
      if constexpr (gathered) {
        rows.begin(p);
        if (more) rows.find(p, plan, next);
      }
      int const expert = plan.expert[tile.expert];
      for (int i = 0; i < count; ++i, at.advance(), --ahead) {
        Stage& stage = ring.stage[at.stage];
        Barrier& full = ring.full[at.stage];
        if (ahead <= 0) ring.empty[at.stage].wait(at.phase ^ 1);
        // What fills the ring first waits behind none of it.
        bool const gathers_first = gathered && filled < kStages;
        if (gathers_first) gather(p, rows, stage, full, tile, i);
        if (ahead <= 0 && lane == 0) load_weights(p, stage, full, expert, tile, i);
        if constexpr (!gathered) {
          __syncwarp();  // bytes are announced first
          load_rows(p, stage, full, tile, i);
        } else if (!gathers_first) {
          gather(p, rows, stage, full, tile, i);
        }
        filled += gathers_first;
      }
    }
  }

  template <int width>
  static __device__ void consume_tile(Params const& p, Cursor& at, Tile const& tile, int count,
                                      SharedStorage& smem) {
    float acc[S.parts][width / 2];
#pragma unroll
    for (auto& part : acc) forget_registers(part);
    bool const started = p.results.start(acc, tile);
    smem.ring.template sum<width>(acc, started, at, count);
    p.results.store(acc, tile, smem.results);
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Plan const& plan) {
    if (p.early) start_in_turn();
    if (p.plan.writes && blockIdx.x + 1 == gridDim.x) {
      smem.planner.template store<32 * kConsumerWarps>(p.plan.sort, plan);
    }
    TileFinder<RowTiles> finder(work_of(p, plan), blockIdx.x, gridDim.x);
    int const count = stages_of(p);
    Cursor at;
    for (Tile tile; finder.next(tile);) {
      int const width = width_of(tile);
      tile.expert = plan.expert[tile.expert];
      if (width == 8) {
        consume_tile<8>(p, at, tile, count, smem);
      } else if (S.tokens >= 16 && width == 16) {
        consume_tile<std::min(16, S.tokens)>(p, at, tile, count, smem);
      } else if (S.tokens >= 32 && width == 32) {
        consume_tile<std::min(32, S.tokens)>(p, at, tile, count, smem);
      } else if (S.tokens >= 64) {
        consume_tile<std::min(64, S.tokens)>(p, at, tile, count, smem);
      }
    }
  }

  static __device__ void run(Params const& p) {
    extern __shared__ __align__(1024) char memory[];
    auto& smem = *reinterpret_cast<SharedStorage*>(memory);
    if (threadIdx.x == 0) {
      prefetch(p.weight[0]);
      prefetch(p.weight[1]);
      if (!gathered) prefetch(p.x_map);
      smem.ring.init(kArrivals);
    }
    __syncthreads();  // while kernels before still run
    if (!p.early) start_in_turn();
    bool const sorts = p.plan.sort.ids != nullptr;
    Plan const plan = sorts ? smem.planner.sort(p.plan.sort) : smem.planner.find(p.plan.groups);
    if (warp_index() == kConsumerWarps) {
      produce(p, smem.ring, plan);
    } else {
      consume(p, smem, plan);
    }
  }
};

template <class Product>
__global__ void __launch_bounds__(Product::kThreads, kAtOnce) decode_kernel(
    __grid_constant__ typename Product::Params const p) {
  Product::run(p);
}

}  // namespace guild::cuda::sm90
