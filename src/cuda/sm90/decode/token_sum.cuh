// The down projection of a single token together with the sum over its experts, which saves the
// launch of combine: O = residual + sum over k of score[k] * (A[row of k] W[expert of k]^T + bias).
// Shared experts as wide as the others are one more of them, whose results are the residual.
//
// The token's experts share wgmma's M: `width` rows of the weight of each lie side by side in a
// tile. Its N is all rows of A, of which an expert needs its own; what it makes of the others is
// not looked at. So a tile holds a few columns of all experts' results, and adds them up as combine
// does: rounded to T, in fp32, k ascending.
#pragma once
#include "cuda/sm90/arch/copy.cuh"
#include "cuda/sm90/decode/plan.cuh"
#include "cuda/sm90/decode/ring.cuh"
#include "cuda/sm90/outputs.cuh"

namespace guild::cuda::sm90 {

// S.tokens: slots that the token may have. S.rows: of all experts' weights in a tile.
template <class T, DecodeShape S, int stage_bytes = S.stage_bytes()>
struct TokenSumKernel {
  static constexpr int kThreads = kPlanThreads, kPadded = 64 * S.parts() + 8, most = S.tokens;
  using Ring = sm90::Ring<stage_bytes>;
  using Stage = typename Ring::Stage;
  using Cursor = typename Ring::Cursor;

  struct Params {
    Sort sort;           // of one token
    float const* score;  // of a slot; null: 1
    CUtensorMap weight;  // boxes of 64 x `width`
    CUtensorMap a_map;   // (k, 1, rows), boxes of 64 x 1 x 8
    int width;           // rows of an expert's weight in a tile
    int across, columns, k;
    Bias<T> bias;
    T const* residual;            // null: none
    float const* residual_scale;  // null: 1
    T* o;
    bool shared;                // whether there are shared experts; row top_k of A is theirs
    CUtensorMap shared_weight;  // as weight
  };

  // What the sum needs of a slot.
  struct Term {
    int at;  // of its results of the block's first column, in `value`; -1: id out of range
    float score;
  };
  struct Working {
    T value[most][kPadded];  // (rows of A, rows of the tile), padded
    Term term[most];
  };
  struct SharedStorage {
    Ring ring;
    Working working;
    Planner planner;
  };
  static_assert(sizeof(SharedStorage) <= 226 * 1024 / kAtOnce, "too many stages");
  static_assert(sizeof(SharedStorage) >= sizeof(Ring) + read_after(S));

  static __device__ int stages_of(Params const& p) {
    return (p.k + 64 * S.steps() - 1) / (64 * S.steps());
  }

  // The producer's warp: announces a stage's bytes and issues its weights, a box a lane.
  static __device__ void load_weights(Params const& p, Plan const& plan, Stage& stage,
                                      Barrier& full, int tile, int index) {
    int const lane = threadIdx.x % 32, box = p.width * kRowBytes;
    int const groups = plan.count + p.shared, boxes = groups * S.steps();
    if (lane == 0) full.arrive_expect(boxes * box);
    __syncwarp();
    if (lane >= boxes) return;
    int const step = lane / groups, group = lane % groups;
    bool const shared = group == plan.count;
    tma_load_once(
        shared ? p.shared_weight : p.weight, stage.weight + step * S.step_bytes() + group * box,
        {64 * (index * S.steps() + step), tile * p.width, shared ? 0 : plan.expert[group]}, full,
        evict_first());
  }

  // Calls f(tile, index) for each stage of the block's tiles.
  template <class F>
  static __device__ void for_each_stage(Params const& p, F&& f) {
    int const count = stages_of(p);
    for (int tile = blockIdx.x; tile < p.across; tile += gridDim.x) {
      for (int i = 0; i < count; ++i) f(tile, i);
    }
  }

  // The warp that loads weights, from stage `at` on.
  static __device__ void load(Params const& p, Ring& ring, Plan const& plan, Cursor at) {
    for_each_stage(p, [&](int tile, int i) {
      ring.empty[at.stage].wait(at.phase ^ 1);
      load_weights(p, plan, ring.stage[at.stage], ring.full[at.stage], tile, i);
      at.advance();
    });
  }

  // The warp that loads A, once it is there.
  static __device__ void load_rows(Params const& p, Ring& ring, Cursor at) {
    int const lane = threadIdx.x % 32, step = lane / (most / 8), box = lane % (most / 8);
    for_each_stage(p, [&](int, int i) {
      Barrier& full = ring.full[at.stage];
      ring.empty[at.stage].wait(at.phase ^ 1);
      if (lane == 0) full.arrive_expect(S.steps() * S.token_bytes());
      __syncwarp();
      if (lane < S.steps() * most / 8) {
        tma_load(p.a_map, ring.stage[at.stage].template x<S>(step) + box * 8 * kRowBytes,
                 {64 * (i * S.steps() + step), 0, 8 * box}, full);
      }
      at.advance();
    });
  }

  // Fills the accumulators with the experts' biases; false if there are none.
  static __device__ bool start(Params const& p, Plan const& plan, float (&acc)[S.parts()][most / 2],
                               int tile) {
    if (p.bias.data == nullptr) return false;
#pragma unroll
    for (int half = 0; half < 2 * S.parts(); ++half) {
      int const row = row_of(half / 2, half % 2), group = row / p.width;
      int const col = tile * p.width + row % p.width;
      float value = 0;
      if (group < plan.count && col < p.columns) {
        value = to_float(p.bias.data[plan.expert[group] * p.bias.stride + col]);
      }
#pragma unroll
      for (int i = 0; i < most / 2; ++i) {
        if (i % 4 / 2 == half % 2) acc[half / 2][i] = value;
      }
    }
    return true;
  }

  static __device__ void find_terms(Params const& p, Plan const& plan, Planner const& planner,
                                    Working& smem) {
    int const slot = threadIdx.x;
    if (slot >= p.sort.top_k) return;
    int const row = planner.row_of[slot];
    int group = 0;
    while (row >= 0 && plan.end[group + 1] <= row) ++group;
    smem.term[slot] = {row < 0 ? -1 : row * kPadded + group * p.width,
                       p.score == nullptr ? 1.f : p.score[slot]};
  }

  static __device__ void store(Params const& p, Plan const& plan,
                               float const (&acc)[S.parts()][most / 2], int tile, Working& smem) {
    consumers_barrier();
#pragma unroll
    for (int part = 0; part < S.parts(); ++part) {
#pragma unroll
      for (int i = 0; i < most / 2; ++i) {
        int const token = i / 4 * 8 + fragment_column(threadIdx.x) + i % 2;
        smem.value[token][row_of(part, i % 4 / 2)] = T(acc[part][i]);
      }
    }
    consumers_barrier();
    int const own = threadIdx.x, col = tile * p.width + own;
    if (own >= p.width || col >= p.columns) return;
    float sum = p.shared ? to_float(smem.value[p.sort.top_k][plan.count * p.width + own])
                : p.residual != nullptr ? to_float(p.residual[col])
                                        : 0.f;
    if (p.residual_scale != nullptr) sum = to_float(T(*p.residual_scale * sum));
    for (int k = 0; k < p.sort.top_k; ++k) {
      Term const term = smem.term[k];
      if (term.at >= 0) sum += term.score * to_float((&smem.value[0][0])[term.at + own]);
    }
    p.o[col] = T(sum);
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Plan const& plan) {
    find_terms(p, plan, smem.planner, smem.working);
    wait_for_previous();
    let_next_start();
    sum_up(p, smem.ring, smem.working, plan, {});
  }

  static __device__ void consume_from(Params const& p, Ring& ring, Working& working,
                                      Planner const& planner, Plan const& plan, Cursor at) {
    find_terms(p, plan, planner, working);
    sum_up(p, ring, working, plan, at);
  }

  static __device__ void sum_up(Params const& p, Ring& ring, Working& working, Plan const& plan,
                                Cursor at) {
    int const count = stages_of(p);
    for (int tile = blockIdx.x; tile < p.across; tile += gridDim.x) {
      float acc[S.parts()][most / 2];
#pragma unroll
      for (auto& part : acc) forget_registers(part);
      bool const started = start(p, plan, acc, tile);
      ring.template sum<T, S, Major::K, most>(acc, started, at, count);
      store(p, plan, acc, tile, working);
    }
  }

  static __device__ void run(Params const& p) {
    extern __shared__ __align__(1024) char memory[];
    auto& smem = *reinterpret_cast<SharedStorage*>(memory);
    if (threadIdx.x == 0) {
      prefetch(p.weight);
      prefetch(p.a_map);
      smem.ring.init(/*arrivals=*/2);
    }
    __syncthreads();
    Plan const plan = smem.planner.sort_in_warp(p.sort);
    if (warp_index() == kConsumerWarps) {
      load(p, smem.ring, plan, {});
    } else if (warp_index() > kConsumerWarps) {
      wait_for_previous();
      load_rows(p, smem.ring, {});
    } else {
      consume(p, smem, plan);
    }
  }

 private:
  // Row of a tile: of a thread's sums, or the one 8 further down.
  static __device__ int row_of(int part, int below) {
    return 64 * part + fragment_row(threadIdx.x) + 8 * below;
  }
  static __device__ void consumers_barrier() { named_barrier(1, 32 * kConsumerWarps); }
};

}  // namespace guild::cuda::sm90
