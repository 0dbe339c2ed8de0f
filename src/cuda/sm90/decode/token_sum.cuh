// The down projection of one or a few tokens, fused with the sum over each token's experts, which
// saves the launch of combine:
//
//   O = residual + sum over k of score[k] * (A[row of k] W[expert of k]^T + bias)
//
// For a single token, shared experts as wide as the others count as one more expert; their results
// are the residual.
//
// The experts share wgmma's M: a tile has `width` rows of each expert's weight, side by side, and
// takes them in passes of as many experts as a stage holds. N is all rows of A of a pass; each
// expert needs only its own, and its results for the others are ignored. A tile thus has a few
// columns of all experts' results and adds them up as combine does: rounded to T, in fp32, k
// ascending.
//
// With transposed weights a tile has 64 columns, 128 bytes: a full L2 line, since narrower boxes
// load more slowly (docs/measured/). A cluster of blocks shares such a tile, for one token: each
// block takes one pass, with some of the experts, and sends its results to the first block, which
// adds them up.
#pragma once
#include "cuda/arch/cluster.cuh"
#include "cuda/arch/copy.cuh"
#include "cuda/sm90/decode/plan.cuh"
#include "cuda/sm90/decode/ring.cuh"
#include "cuda/sm90/outputs.cuh"

namespace guild::cuda::sm90 {

// The most slots of all tokens, shared experts included: in passes of 32 rows; in those of 8 or 16,
// as many as the pass has rows.
inline constexpr int kMostSummedSlots = 40;

// The most rows of an expert's weight in a tile: with them, the most slots that a shape is meant
// for fill a stage.
constexpr int most_width(DecodeShape s, int at_once, Major major) {
  if (major == Major::MN) return 64;
  return s.tokens > 8 ? 8 : s.rows == 32 || at_once == 1 ? 32 : 16;
}
// The rows of each of so many slots' weights.
constexpr int width_of(DecodeShape s, int at_once, Major major, int64_t slots) {
  int width = most_width(s, at_once, major);
  while (major == Major::K && width > 8 && width * slots > s.rows) width /= 2;
  return width;
}

// S.tokens: rows of A of a pass. S.rows: of all experts' weights in a stage. plain: weights come by
// group_map(), and there are no biases. at_once: blocks that share a multiprocessor. major: MN for
// transposed weights.
template <class T, DecodeShape S, bool plain, int at_once, Major major = Major::K,
          int stage_bytes = S.stage_bytes()>
struct TokenSumKernel {
  static constexpr int kThreads = kPlanThreads, kBlocksAtOnce = at_once;
  static constexpr int kStages = stages_of_block(stage_bytes, at_once);
  using Stage = RingStage<stage_bytes>;
  using Ring = sm90::Ring<Stage, kStages>;
  using Sums = float[S.parts()][S.tokens / 2];
  static constexpr int kHalves = 2 * S.parts();  // of a thread's sums: rows r and r + 8 of a part
  static constexpr int kMostSlots = S.tokens == 32 ? kMostSummedSlots : S.tokens;
  static constexpr int kMostWidth = most_width(S, at_once, major);
  static constexpr bool kTransposed = major == Major::MN;
  static_assert(!(kTransposed && plain));

  // Of weights.
  struct Source {
    // By group_map(), a stage of an expert's rows; else boxes of 64 x 8, transposed 64 x 64.
    CUtensorMap map;
    bool by_group;
  };
  struct Params {
    Sort sort;
    float const* score;  // of a slot; null: 1
    Source weight;
    CUtensorMap a_map;  // (k, 1, rows), boxes of 64 x 1 x 8
    int width_log2;     // of the rows of an expert's weight in a tile, 8 to kMostWidth
    int across, columns, k;
    int cluster;  // blocks that share a tile, each with a pass at most; 1 unless transposed
    Bias<T> bias;
    T const* residual;            // null: none
    float const* residual_scale;  // of a token; null: 1
    T* o;
    int64_t residual_stride, o_stride;
    bool shared;           // whether there are shared experts; row top_k of A is theirs
    Source shared_weight;  // as weight

    __device__ int width() const { return 1 << width_log2; }
    __device__ int stages() const { return (k + 64 * S.steps() - 1) / (64 * S.steps()); }
  };

  // What the sum needs of a slot.
  struct Term {
    int row;  // of A; -1: id out of range
    float score;
  };
  struct OfBlock {
    T value[kMostSlots][kMostWidth + 8];  // of a row of A, its own expert's; padded
    Term term[kMostSlots];
  };
  struct OfCluster {
    int value[kMostSlots][kMostWidth];  // the same, as the bits of a T; used in the first block
    Term term[kMostSlots];
    Barrier landed;  // all values
  };
  using Working = std::conditional_t<kTransposed, OfCluster, OfBlock>;
  struct SharedStorage {
    Stage stage[kStages];
    Ring ring;
    Working working;
    Planner planner;
  };
  static constexpr int kBytes =
      std::max(int(sizeof(SharedStorage)), int(sizeof(Stage)) * kStages + read_after_groups(S));
  static_assert(kBytes <= 226 * 1024 / at_once, "too many stages");

  // A pass: a range of groups, counting the plan's first and then the shared experts, and their
  // rows of A.
  struct Pass {
    int tile, first, last, row, rows;
  };
  // Calls f(Pass) for all passes of a block. The groups of a pass have more than S.tokens rows only
  // if a token names an expert twice; the pass is then repeated for the remaining rows.
  template <class F>
  static __device__ void for_each_pass(Params const& p, Plan const& plan, F&& f) {
    int const groups = plan.count + p.shared;
    if constexpr (kTransposed) {
      int const each = (groups + p.cluster - 1) / p.cluster;
      int const first = cluster_rank() * each, last = min(groups, first + each);
      if (first >= last) return;
      int const row = rows_of(p, plan, first).begin;
      f(Pass{tile_of(p), first, last, row, rows_of(p, plan, last - 1).end - row});
    } else {
      int const most = S.rows >> p.width_log2, count = (groups + most - 1) / most;
      int const each = count > 1 ? (groups + count - 1) / count : groups;
      for (int tile = blockIdx.x; tile < p.across; tile += gridDim.x) {
#pragma unroll 1
        for (int first = 0; first < groups; first += each) {
          int const last = min(groups, first + each), end = rows_of(p, plan, last - 1).end;
#pragma unroll 1
          for (int row = rows_of(p, plan, first).begin; row < end; row += S.tokens) {
            f(Pass{tile, first, last, row, min(S.tokens, end - row)});
          }
        }
      }
    }
  }

  // The tile of a cluster's blocks.
  static __device__ int tile_of(Params const& p) { return int(blockIdx.x) / p.cluster; }

  struct Rows {
    int begin, end;
  };
  // The rows of A of a group.
  static __device__ Rows rows_of(Params const& p, Plan const& plan, int group) {
    if (group < plan.count) return {plan.end[group], plan.end[group + 1]};
    return {int(p.sort.top_k), int(p.sort.top_k) + 1};
  }

  // The warp that loads weights: a lane loads an expert's share of a stage, or a box.
  static __device__ void load(Params const& p, Plan const& plan, SharedStorage& smem) {
    RingCursor at{kStages};
    int const lane = threadIdx.x % 32, count = p.stages(),
              each = S.steps() * kRowBytes << p.width_log2;
    uint64_t const policy = evict_first();
    for_each_pass(p, plan, [&](Pass const& pass) {
      int const group = pass.first + lane, groups = pass.last - pass.first;
      bool const shared = group == plan.count;
      int const expert = lane < groups && !shared ? plan.expert[group] : 0;
      CUtensorMap const& map = (shared ? p.shared_weight : p.weight).map;
      int const row = pass.tile << (p.width_log2 - 3);
#pragma unroll 1
      for (int i = 0; i < count; ++i, at.advance()) {
        Barrier& full = smem.ring.full[at.stage];
        smem.ring.empty[at.stage].wait(at.phase ^ 1);
        if (lane == 0) full.arrive_expect(groups * each);
        __syncwarp();
        if constexpr (kTransposed) {
          load_blocks(p, plan, smem.stage[at.stage], full, pass, i, policy);
        } else if (!plain && !p.weight.by_group) {
          load_boxes(p, plan, smem.stage[at.stage], full, pass, i, policy);
        } else if (lane < groups) {
          tma_load_stage<StageBox::group>(map, smem.stage[at.stage].weight + lane * each,
                                          {row, i * S.steps(), expert}, full, policy);
        }
        __syncwarp();
      }
    });
  }
  // The same by boxes of 64 x 8.
  static __device__ void load_boxes(Params const& p, Plan const& plan, Stage& stage, Barrier& full,
                                    Pass const& pass, int index, uint64_t policy) {
    int const boxes = (S.steps() << p.width_log2) / 8;  // of an expert
    for (int i = threadIdx.x % 32; i < (pass.last - pass.first) * boxes; i += 32) {
      int const group = pass.first + i / boxes, row = i % boxes / S.steps(), step = i % S.steps();
      bool const shared = group == plan.count;
      tma_load_once((shared ? p.shared_weight : p.weight).map, stage.weight + i * 8 * kRowBytes,
                    {64 * (index * S.steps() + step), (pass.tile << p.width_log2) + 8 * row,
                     shared ? 0 : plan.expert[group]},
                    full, policy);
    }
  }

  // The same of transposed weights, by boxes of 64 x 64: each step of all experts, one after the
  // other.
  static __device__ void load_blocks(Params const& p, Plan const& plan, Stage& stage, Barrier& full,
                                     Pass const& pass, int index, uint64_t policy) {
    int const groups = pass.last - pass.first, i = threadIdx.x % 32;
    if (i >= groups * S.steps()) return;
    int const step = i / groups, group = i % groups;
    tma_load_once(
        p.weight.map, stage.weight + step * S.step_bytes() + group * kBlockBytes,
        {64 * pass.tile, 64 * (index * S.steps() + step), plan.expert[pass.first + group]}, full,
        policy);
  }

  // The warp that loads A, once it is there.
  static __device__ void load_rows(Params const& p, Plan const& plan, SharedStorage& smem) {
    RingCursor at{kStages};
    int const lane = threadIdx.x % 32, step = lane % S.steps(), box = lane / S.steps();
    int const count = p.stages();
    for_each_pass(p, plan, [&](Pass const& pass) {
      int const boxes = (pass.rows + 7) / 8;
#pragma unroll 1
      for (int i = 0; i < count; ++i, at.advance()) {
        Barrier& full = smem.ring.full[at.stage];
        smem.ring.empty[at.stage].wait(at.phase ^ 1);
        if (lane == 0) full.arrive_expect(S.steps() * boxes * 8 * kRowBytes);
        __syncwarp();
        if (box < boxes) {
          tma_load(p.a_map, smem.stage[at.stage].template x<S>(step) + box * 8 * kRowBytes,
                   {64 * (i * S.steps() + step), 0, pass.row + 8 * box}, full);
        }
        __syncwarp();
      }
    });
  }

  // The group whose sums each half of a thread's fragment holds.
  struct Own {
    int group[kHalves], col[kHalves];  // of the tile
    Rows rows[kHalves];                // of the group, counted from the pass's first

    __device__ Own(Params const& p, Plan const& plan, Pass const& pass) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        int const row = 64 * (half / 2) + fragment_row(threadIdx.x) + 8 * (half % 2);
        group[half] = pass.first + (row >> p.width_log2);
        col[half] = row & (p.width() - 1);
        rows[half] = {0, 0};
        if (group[half] >= pass.last) continue;
        Rows const all = rows_of(p, plan, group[half]);
        rows[half] = {all.begin - pass.row, all.end - pass.row};
      }
    }
  };

  // Fills the accumulators with the experts' biases; false if there are none.
  static __device__ bool start(Params const& p, Plan const& plan, Sums& acc, Pass const& pass,
                               Own const& own) {
    if (p.bias.data == nullptr) return false;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      int const col = (pass.tile << p.width_log2) + own.col[half], group = own.group[half];
      float value = 0;
      if (group < min(pass.last, plan.count) && col < p.columns) {
        value = float(p.bias.data[plan.expert[group] * p.bias.stride + col]);
      }
#pragma unroll
      for (int i = 0; i < S.tokens / 2; ++i) {
        if (i % 4 / 2 == half % 2) acc[half / 2][i] = value;
      }
    }
    return true;
  }

  // Keeps the results of a pass's experts for their own rows.
  static __device__ void keep(Sums const& acc, Pass const& pass, Own const& own, Working& smem) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < S.tokens / 2; ++i) {
        int const row = i / 4 * 8 + fragment_column(threadIdx.x) + i % 2;
        Rows const rows = own.rows[half];
        if (i % 4 / 2 == half % 2 && row >= rows.begin && row < rows.end) {
          T const value(acc[half / 2][i]);
          auto& to = smem.value[pass.row + row][own.col[half]];
          if constexpr (kTransposed) {
            store_to_block(&to, std::bit_cast<uint16_t>(value), smem.landed, /*rank=*/0);
          } else {
            to = value;
          }
        }
      }
    }
  }

  static __device__ void find_terms(Params const& p, Planner const& planner, Working& smem) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.sort.tokens * p.sort.top_k; i += 32 * kConsumerWarps) {
      // From L2, as Planner::id_of().
      smem.term[i] = {planner.row_of[i], p.score == nullptr ? 1.f : __ldcg(p.score + i)};
    }
  }

  static __device__ float kept_value(T value) { return float(value); }
  static __device__ float kept_value(int bits) { return float(std::bit_cast<T>(uint16_t(bits))); }

  static __device__ void store(Params const& p, int tile, Working const& smem) {
    int const tokens = int(p.sort.tokens), top_k = int(p.sort.top_k);
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens << p.width_log2; i += 32 * kConsumerWarps) {
      int const t = i >> p.width_log2, own = i & (p.width() - 1);
      int const col = (tile << p.width_log2) + own;
      if (col >= p.columns) continue;
      float sum = p.shared                ? kept_value(smem.value[top_k][own])
                  : p.residual != nullptr ? float(p.residual[t * p.residual_stride + col])
                                          : 0.f;
      if (p.residual_scale != nullptr) sum = float(T(p.residual_scale[t] * sum));
#pragma unroll 4
      for (int k = 0; k < top_k; ++k) {
        Term const term = smem.term[t * top_k + k];
        if (term.row >= 0) sum += term.score * kept_value(smem.value[term.row][own]);
      }
      p.o[t * p.o_stride + col] = T(sum);
    }
  }

  static __device__ void consume(Params const& p, Plan const& plan, SharedStorage& smem) {
    find_terms(p, smem.planner, smem.working);
    wait_for_previous();
    let_next_start();
    int const count = p.stages();
    RingCursor at{kStages};
    if constexpr (kTransposed) {
      for_each_pass(p, plan, [&](Pass const& pass) { sum(p, plan, smem, pass, at, count); });
      if (cluster_rank() > 0) return;
      consumers_barrier();  // the terms
      smem.working.landed.wait(0);
      return store(p, tile_of(p), smem.working);
    }
    int tile = blockIdx.x;
    // Adds up and stores a tile's results once all of its values are there.
    auto const end_tile = [&] {
      consumers_barrier();
      store(p, tile, smem.working);
      consumers_barrier();
    };
    for_each_pass(p, plan, [&](Pass const& pass) {
      if (pass.tile != tile) end_tile();
      tile = pass.tile;
      sum(p, plan, smem, pass, at, count);
    });
    if (plan.count + p.shared > 0) return end_tile();
    for (; tile < p.across; tile += gridDim.x) end_tile();  // no expert at all
  }
  static __device__ void sum(Params const& p, Plan const& plan, SharedStorage& smem,
                             Pass const& pass, RingCursor& at, int count) {
    Sums acc;
#pragma unroll
    for (auto& part : acc) forget_registers(part);
    Own const own(p, plan, pass);
    bool const started = !plain && start(p, plan, acc, pass, own);
    smem.ring.template sum<T, S, major, S.tokens, !kTransposed>(acc, started, smem.stage, at,
                                                                count);
    keep(acc, pass, own, smem.working);
  }

  static __device__ void run(Params const& p) {
    extern __shared__ __align__(1024) char memory[];
    auto& smem = *reinterpret_cast<SharedStorage*>(memory);
    if (threadIdx.x == 0) {
      prefetch(p.weight.map);
      prefetch(p.a_map);
      if constexpr (kTransposed) smem.working.landed.init(1);
      smem.ring.init(/*arrivals=*/2);
    }
    kTransposed ? cluster_barrier() : __syncthreads();
    Plan const plan = plan_of(p.sort, smem.planner);
    if constexpr (kTransposed) {  // only the first block waits for it
      int const rows = plan.end[plan.count];
      if (threadIdx.x == 0) smem.working.landed.arrive_expect(4 * kMostWidth * rows);
    }
    if (warp_index() == kConsumerWarps) {
      load(p, plan, smem);
    } else if (warp_index() > kConsumerWarps) {
      wait_for_previous();
      load_rows(p, plan, smem);
    } else {
      consume(p, plan, smem);
    }
  }

 private:
  static __device__ Plan plan_of(Sort const& sort, Planner& planner) {
    return kMostSlots <= kMostSlotsInWarp ? planner.sort_few(sort) : planner.sort_in_block(sort);
  }
  static __device__ void consumers_barrier() { named_barrier(1, 32 * kConsumerWarps); }
};

}  // namespace guild::cuda::sm90
