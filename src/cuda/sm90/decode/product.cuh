// A grouped product for few tokens, bound by reading each weight once from memory.
//
// Operands are swapped: 64 rows of a weight are wgmma's M, 8 to 64 rows of X its N. Per block, one
// producer warp streams weights through a deep ring that continues across tiles, one loads rows of
// X, and one consumer warpgroup multiplies and stores. One accumulator sums K in order, in slices
// of 16, so results are bitwise those of sm90/kernel.cuh.
//
// Shared experts, which process every token, are computed in the same launch; their tiles come
// first.
//
//   warps 0 .. 3   consumers
//   warp 4         loads weights by TMA; finds the block's tiles and queues them for the others
//   warp 5         loads rows of X: a gather by cp.async or, where they are packed, TMA
//
// A single producer warp could not issue instructions as fast as memory delivers.
//
// Swapped operands: DeepGEMM, vLLM (docs/papers.md).
#pragma once
#include "cuda/arch/copy.cuh"
#include "cuda/products.h"
#include "cuda/sm90/decode/gathered_rows.cuh"
#include "cuda/sm90/decode/numbers.cuh"
#include "cuda/sm90/decode/plan.cuh"
#include "cuda/sm90/decode/plan_by_choice.cuh"
#include "cuda/sm90/decode/planned_tiles.cuh"
#include "cuda/sm90/decode/results.cuh"
#include "cuda/sm90/decode/ring.cuh"
#include "cuda/sm90/tile_queue.cuh"

namespace guild::cuda::sm90 {

// known: see DecodeResults; where it is swiglu, weights come by whole stages. at_once: blocks that
// share a multiprocessor; 0: the launch decides.
template <class T, DecodeShape S, Major major, bool gathered, bool activates, PlanFrom from,
          StaticActivation known, int at_once = 0, int stage_bytes = S.stage_bytes()>
struct DecodeProduct {
  static constexpr bool kChooses = chooses(from);
  static constexpr bool kPlain = known == StaticActivation::swiglu;
  static_assert(activates || known == StaticActivation::any);
  static constexpr int kThreads = kPlanThreads;
  static constexpr int kBlocksAtOnce = kAtOnce;  // at most, on a multiprocessor
  static constexpr DecodeShape kShape = S;
  static constexpr int kArrivals = gathered ? 33 : 2;

  // Of weights.
  struct Source {
    CUtensorMap part[2];  // boxes of 64 x kBoxRows
    CUtensorMap stage;    // boxes that fill a stage
    bool by_stage;        // stage is there
  };
  struct Params {
    PlanArgs plan;
    std::conditional_t<kChooses, TokenChoice, NoChoice> choice;  // of the plan's slots
    Source weight;
    int32_t const* expert_at[2];  // which matrix is an expert's; null: they are in order
    bool halves;                  // part[1] has the same rows of up; else the rows that follow
    int across, rows, k;          // tiles side by side; rows of X and of the results
    int stages;                   // of the ring
    int rehearsing;               // the first blocks, so many, rehearse a choice
    // Whether the weights and the plan's input were complete when the previous kernel let this one
    // start.
    bool early;
    T const* x;  // gathered: (tokens, k)
    uint32_t stride;
    int32_t const* row_token;
    int tokens;
    CUtensorMap x_map;  // else: (k, 1, rows), boxes of 64 x 1 x 8
    int claims;  // which of `claimed` is this launch's; -1: every block takes every n-th tile
    DecodeResults<T, S, activates, known> results;
    struct Shared {
      Source weight;
      CUtensorMap x_map;
      int rows, across, k;  // rows: of X and of the results; 0: there are none
    } shared;
  };

  // Rows of the weight in a box: where gate and up share a block, half of its rows.
  static constexpr int kBoxRows =
      major == Major::MN ? 64 : std::min(64, activates ? S.rows / 2 : S.rows);
  // Whether gate and up can lie apart.
  static constexpr bool kTakesHalves = activates && S.rows >= 2 * kBoxRows;

  using Stage = RingStage<stage_bytes>;
  using Ring = sm90::Ring<Stage, stages_of_block(stage_bytes, std::max(at_once, 1))>;
  using Storage = typename DecodeResults<T, S, activates, known>::template Storage<S.tokens>;
  using Announced = TileQueue<kConsumerWarps + 1>;
  // After the ring's stages.
  struct SharedStorage {
    Ring ring;
    Storage results;
    union {
      Planner planner;
      std::conditional_t<kChooses, ChoiceAndPlan, NoChoice> choice;
    };
    Announced queue;
  };
  static constexpr int bytes(int stages) {
    return stages * int(sizeof(Stage)) + int(sizeof(SharedStorage));
  }
  static_assert(bytes(stages_of_block(stage_bytes, 1)) <= 226 * 1024, "too many stages");
  static_assert(bytes(stages_of_block(stage_bytes, kAtOnce)) <= 226 * 1024 / kAtOnce,
                "too many stages");
  static_assert(sizeof(SharedStorage) >= read_after(S));
  static __device__ int ring_stages(Params const& p) {
    return at_once > 0 ? stages_of_block(stage_bytes, at_once) : p.stages;
  }
  static __device__ Stage* stages() {
    extern __shared__ __align__(1024) char memory[];
    return reinterpret_cast<Stage*>(memory);
  }

  // In this order, all kernels before this one are complete when the next one starts, and that one
  // may rely on this before it waits.
  static __device__ void start_in_turn() {
    wait_for_previous();
    let_next_start();
  }

  static __device__ bool has_halves(Params const& p) {
    return kPlain || (known == StaticActivation::any && kTakesHalves && p.halves);
  }
  static __device__ RowTiles work_of(Params const& p, Plan const& plan) {
    return {.groups = plan.groups(p.rows),
            .tile_n = has_halves(p) ? S.rows / 2 : S.rows,
            .across = p.across,
            .inner = p.k,
            .tile_m = S.tokens,
            .tail_m = 0,
            .band = 1};  // the tiles that share weights follow each other
  }
  using Tiles = PlannedTiles<S, from>;
  static __device__ Tiles tiles_of(Params const& p, Plan const& plan) {
    return {work_of(p, plan), plan, p.shared.rows, p.shared.across};
  }
  static __device__ Tile no_more() { return {.expert = -1}; }

  static __device__ int stages_of(Params const& p, Tile const& tile) {
    int const k = tile.expert == kSharedExpert ? p.shared.k : p.k;
    return (k + 64 * S.steps() - 1) / (64 * S.steps());
  }

  // One thread: announces the bytes of a stage's weights and issues them.
  static __device__ void load_weights(Params const& p, Stage& stage, Barrier& full,
                                      Tile const& tile, int index, uint64_t policy) {
    bool const shared = tile.expert == kSharedExpert;
    Source const& source = shared ? p.shared.weight : p.weight;
    full.arrive_expect(S.weight_bytes());
    if (kPlain || source.by_stage) {
      tma_load_stage(source.stage, stage.weight,
                     {tile.col, index * S.steps(), shared ? 0 : tile.expert}, full, policy);
      return;
    }
    constexpr int boxes = S.rows / kBoxRows;  // of a step
#pragma unroll
    for (int i = 0; i < S.steps() * boxes; ++i) {
      int const k = 64 * (index * S.steps() + i / boxes);
      bool const second = i % boxes != 0;
      int const row = tile.col + (second && !has_halves(p) ? kBoxRows : 0);
      int const e = shared ? 0 : placed(p.expert_at[second], tile.expert);
      Coordinate const at = major == Major::K ? Coordinate{k, row, e} : Coordinate{row, k, e};
      tma_load_once(source.part[second], stage.weight + i * kBoxRows * kRowBytes, at, full, policy);
    }
  }

  // Where rows of X lie packed: announces a stage's bytes and issues boxes of 8 rows, one a lane.
  static __device__ void load_rows(Params const& p, Stage& stage, Barrier& full, Tile const& tile,
                                   int index) {
    int const lane = threadIdx.x % 32, boxes = loaded_rows(tile) / 8;
    if (lane == 0) full.arrive_expect(S.steps() * boxes * 8 * kRowBytes);
    __syncwarp();
    if (lane >= boxes * S.steps()) return;
    int const step = lane / boxes, box = lane % boxes;
    CUtensorMap const& map = tile.expert == kSharedExpert ? p.shared.x_map : p.x_map;
    tma_load(map, stage.template x<S>(step) + box * 8 * kRowBytes,
             {64 * (index * S.steps() + step), 0, tile.row + 8 * box}, full);
  }

  // The next tile is claimed, then looked up, when this many stages of the current one are left:
  // both wait for memory.
  static constexpr int kAskedAhead = 5, kFoundAhead = 3;
  static __device__ int found_at(int count) { return max(0, count - kFoundAhead); }

  // The weight-loading warp. Announces the block's tiles, each a little ahead. A rehearsal
  // (plan_by_choice.cuh) stops at the first stage and neither loads nor announces anything.
  static __device__ void load(Params const& p, SharedStorage& smem, Plan const& plan,
                              bool rehearses) {
    Ring& ring = smem.ring;
    bool const leads = threadIdx.x % 32 == 0 && !rehearses;
    uint64_t const policy = evict_first();
    Tiles tiles = tiles_of(p, plan);
    TileNumbers numbers(p.claims);
    RingCursor at{ring_stages(p)};
    QueueEnd end;
    Tile tile, next;
    bool waits = p.early, more = tiles.find(numbers.now, next);
    if (!rehearses) smem.queue.put(end, more ? next : no_more());
    while (more) {
      tile = next;
      int const count = stages_of(p, tile);
      int asks_at = max(0, count - kAskedAhead), finds_at = found_at(count);
      // Claiming must wait for the preceding kernel, so fill the ring first.
      if (waits) asks_at = finds_at = max(finds_at, min(count, ring_stages(p)) - 1);
      for (int i = 0; i < count; ++i, at.advance()) {
        ring.empty[at.stage].wait(at.phase ^ 1);
        if (leads) {
          load_weights(p, stages()[at.stage], ring.full[at.stage], tile, i, policy);
        }
        if (rehearses) return;
        if (i == asks_at) {
          if (waits && p.claims >= 0) wait_for_previous();
          waits = waits && p.claims < 0;
          numbers.ask();
        }
        if (i != finds_at) continue;
        numbers.answer();
        more = tiles.find(numbers.now, next);
        if (!more) numbers.fail(tiles.count());
        smem.queue.wait_for_free(end);
        smem.queue.put(end, more ? next : no_more());
      }
    }
  }

  // The warp that loads rows of X.
  static __device__ void gather(Params const& p, SharedStorage& smem, Plan const& plan) {
    if (p.early) wait_for_previous();
    Ring& ring = smem.ring;
    RingCursor at{ring_stages(p)};
    QueueEnd end;
    GatheredRows<S> rows;
    Tile tile, next;
    bool more = smem.queue.take(end, next);
    if constexpr (gathered) {
      if (more) rows.find(p, plan, next);
    }
    while (more) {
      tile = next;
      if constexpr (gathered) rows.begin(p);
      int const count = stages_of(p, tile);
      for (int i = 0; i < count; ++i, at.advance()) {
        Stage& stage = stages()[at.stage];
        Barrier& full = ring.full[at.stage];
        ring.empty[at.stage].wait(at.phase ^ 1);
        if constexpr (gathered) {
          rows.load(p, stage, tile, i);
          full.arrive_when_copied();
        } else {
          load_rows(p, stage, full, tile, i);
        }
        if (i != found_at(count)) continue;
        more = smem.queue.take(end, next);
        if constexpr (gathered) {
          if (more) rows.find(p, plan, next);
        }
      }
    }
  }

  template <int width>
  static __device__ void consume_tile(Params const& p, RingCursor& at, Tile const& tile, Ring& ring,
                                      Storage& storage) {
    float acc[S.parts()][width / 2];
#pragma unroll
    for (auto& part : acc) forget_registers(part);
    bool const started = !kPlain && p.results.start(acc, tile);
    ring.template sum<T, S, major, width>(acc, started, stages(), at, stages_of(p, tile));
    p.results.store(acc, tile, storage);
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Plan const& plan) {
    if (p.early) start_in_turn();
    if (from != PlanFrom::offsets && p.plan.writes && blockIdx.x + 1 == gridDim.x) {
      smem.planner.template store<32 * kConsumerWarps>(p.plan.sort, plan);
    }
    RingCursor at{ring_stages(p)};
    QueueEnd end;
    for (Tile tile; smem.queue.take(end, tile);) {
      if (tile.rows <= 8) {
        consume_tile<8>(p, at, tile, smem.ring, smem.results);
      } else if (S.tokens >= 16 && tile.rows <= 16) {
        consume_tile<std::min(16, S.tokens)>(p, at, tile, smem.ring, smem.results);
      } else if (S.tokens >= 32 && tile.rows <= 32) {
        consume_tile<std::min(32, S.tokens)>(p, at, tile, smem.ring, smem.results);
      } else if (S.tokens >= 64) {
        consume_tile<std::min(64, S.tokens)>(p, at, tile, smem.ring, smem.results);
      }
    }
  }

  static __device__ Plan plan_of(Params const& p, SharedStorage& smem, bool rehearses) {
    if constexpr (kChooses) {
      constexpr auto ranking = from == PlanFrom::softmax_choice ? Ranking::softmax : Ranking::any;
      return plan_by_choice<ranking>(p.choice, p.plan.sort, smem.choice, rehearses);
    } else {
      if (!p.early) start_in_turn();
      if (from == PlanFrom::few_slots) return smem.planner.sort_few(p.plan.sort);
      bool const sorted =
          from == PlanFrom::any ? p.plan.sort.ids == nullptr : from == PlanFrom::offsets;
      return sorted ? smem.planner.find(p.plan.groups) : smem.planner.sort(p.plan.sort);
    }
  }

  // All that a block does once its barriers are there.
  static __device__ void work(Params const& p, SharedStorage& smem, bool rehearses) {
    Plan const plan = plan_of(p, smem, rehearses);
    if (warp_index() == kConsumerWarps) {
      load(p, smem, plan, rehearses);
    } else if (rehearses) {
      return;
    } else if (warp_index() > kConsumerWarps) {
      gather(p, smem, plan);
    } else {
      consume(p, smem, plan);
    }
  }

  static __device__ void run(Params const& p) {
    auto& smem = *reinterpret_cast<SharedStorage*>(stages() + ring_stages(p));
    if (threadIdx.x == 0) {
      if (kPlain || p.weight.by_stage) {
        prefetch(p.weight.stage);
      } else {
        prefetch(p.weight.part[0]);
        prefetch(p.weight.part[1]);
      }
      if (!gathered) prefetch(p.x_map);
      smem.ring.init(kArrivals);
      smem.queue.init(0);
    }
    __syncthreads();  // while kernels before still run
    if constexpr (kChooses) {
      prefetch_biases(p.choice.route);
      bool rehearses = int(blockIdx.x) < p.rehearsing;
      // One copy of the instructions serves both passes.
#pragma unroll 1
      for (;; rehearses = false) {
        work(p, smem, rehearses);
        if (!rehearses) return;
        __syncthreads();
      }
    } else {
      work(p, smem, false);
    }
  }
};

}  // namespace guild::cuda::sm90
