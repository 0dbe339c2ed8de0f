// The down projection of a single token together with the sum over its experts, which saves the
// launch of combine: O = residual + sum over k of score[k] * (A[row of k] W[expert of k]^T + bias).
//
// The token's experts share wgmma's M: `width` rows of the weight of each lie side by side in a
// block of 64. Its N is all rows of A, of which an expert needs its own; what it makes of the
// others is not looked at. So a block holds a few columns of all experts' results, and adds them up
// as combine does: rounded to T, in fp32, k ascending.
#pragma once
#include "cuda/sm90/arch/copy.cuh"
#include "cuda/sm90/decode/plan.cuh"
#include "cuda/sm90/decode/ring.cuh"
#include "cuda/sm90/outputs.cuh"

namespace guild::cuda::sm90 {

// most: slots that the token may have, a multiple of 8.
template <class T, int most>
struct TokenSumKernel {
  static constexpr int kThreads = kPlanThreads, kPadded = 64 + 8;
  static constexpr DecodeShape kShape{most, 1};
  using Ring = sm90::Ring<T, kShape, Major::K>;
  using Stage = typename Ring::Stage;
  using Cursor = typename Ring::Cursor;

  struct Params {
    Sort sort;           // of one token
    float const* score;  // of a slot; null: 1
    CUtensorMap weight;  // boxes of 64 x `width`
    CUtensorMap a_map;   // (k, 1, rows), boxes of 64 x 1 x 8
    int width;           // rows of an expert's weight in a block
    int across, columns, k;
    Bias<T> bias;
    T const* residual;  // null: none
    T* o;
  };

  // What the sum needs of a slot.
  struct Term {
    int at;  // of its results of the block's first column, in `value`; -1: id out of range
    float score;
  };
  struct SharedStorage {
    Ring ring;
    T value[most][kPadded];  // (rows of A, rows of the block), padded
    Term term[most];
    Planner planner;
  };
  static_assert(sizeof(SharedStorage) <= 226 * 1024 / kAtOnce, "too many stages");

  static __device__ int stages_of(Params const& p) {
    return (p.k + 64 * kShape.steps() - 1) / (64 * kShape.steps());
  }

  // The producer's warp: announces a stage's bytes and issues its weights, a box a lane.
  static __device__ void load_weights(Params const& p, Plan const& plan, Stage& stage,
                                      Barrier& full, int tile, int index) {
    int const lane = threadIdx.x % 32, box = p.width * kRowBytes;
    int const boxes = plan.count * kShape.steps();
    if (lane == 0) full.arrive_expect(boxes * box + kShape.steps() * kShape.token_bytes());
    __syncwarp();
    if (lane >= boxes) return;
    int const step = lane / plan.count, group = lane % plan.count;
    tma_load_once(p.weight, stage.weight[step] + group * box,
                  {64 * (index * kShape.steps() + step), tile * p.width, plan.expert[group]}, full,
                  evict_first());
  }

  static __device__ void produce(Params const& p, Ring& ring, Plan const& plan) {
    int const lane = threadIdx.x % 32, count = stages_of(p);
    int ahead = 0;  // stages whose weights are under way
    for (int tile = blockIdx.x; tile < p.across && ahead < Ring::kStages; tile += gridDim.x) {
      for (int i = 0; i < count && ahead < Ring::kStages; ++i, ++ahead) {
        load_weights(p, plan, ring.stage[ahead], ring.full[ahead], tile, i);
      }
    }
    wait_for_previous();
    Cursor at;
    for (int tile = blockIdx.x; tile < p.across; tile += gridDim.x) {
      for (int i = 0; i < count; ++i, at.advance(), --ahead) {
        Stage& stage = ring.stage[at.stage];
        Barrier& full = ring.full[at.stage];
        if (ahead <= 0) {
          ring.empty[at.stage].wait(at.phase ^ 1);
          load_weights(p, plan, stage, full, tile, i);
        }
        if (lane < kShape.steps() * most / 8) {
          int const step = lane / (most / 8), box = lane % (most / 8);
          tma_load(p.a_map, stage.x[step] + box * 8 * kRowBytes,
                   {64 * (i * kShape.steps() + step), 0, 8 * box}, full);
        }
      }
    }
  }

  // Fills the accumulators with the experts' biases; false if there are none.
  static __device__ bool start(Params const& p, Plan const& plan, float (&acc)[most / 2],
                               int tile) {
    if (p.bias.data == nullptr) return false;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      int const row = fragment_row(threadIdx.x) + 8 * below, group = row / p.width;
      int const col = tile * p.width + row % p.width;
      float value = 0;
      if (group < plan.count && col < p.columns) {
        value = to_float(p.bias.data[plan.expert[group] * p.bias.stride + col]);
      }
#pragma unroll
      for (int i = 0; i < most / 2; ++i) {
        if (i % 4 / 2 == below) acc[i] = value;
      }
    }
    return true;
  }

  static __device__ void find_terms(Params const& p, Plan const& plan, SharedStorage& smem) {
    int const slot = threadIdx.x;
    if (slot >= p.sort.top_k) return;
    int const row = smem.planner.row_of[slot];
    int group = 0;
    while (row >= 0 && plan.end[group + 1] <= row) ++group;
    smem.term[slot] = {row < 0 ? -1 : row * kPadded + group * p.width,
                       p.score == nullptr ? 1.f : p.score[slot]};
  }

  static __device__ void store(Params const& p, float const (&acc)[most / 2], int tile,
                               SharedStorage& smem) {
    consumers_barrier();
#pragma unroll
    for (int i = 0; i < most / 2; ++i) {
      int const row = fragment_row(threadIdx.x) + i % 4 / 2 * 8;
      smem.value[i / 4 * 8 + fragment_column(threadIdx.x) + i % 2][row] = T(acc[i]);
    }
    consumers_barrier();
    int const own = threadIdx.x, col = tile * p.width + own;
    if (own >= p.width || col >= p.columns) return;
    float sum = p.residual == nullptr ? 0.f : to_float(p.residual[col]);
    for (int k = 0; k < p.sort.top_k; ++k) {
      Term const term = smem.term[k];
      if (term.at >= 0) sum += term.score * to_float((&smem.value[0][0])[term.at + own]);
    }
    p.o[col] = T(sum);
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Plan const& plan) {
    find_terms(p, plan, smem);
    wait_for_previous();
    let_next_start();
    int const count = stages_of(p);
    Cursor at;
    for (int tile = blockIdx.x; tile < p.across; tile += gridDim.x) {
      float acc[1][most / 2];
      forget_registers(acc[0]);
      bool const started = start(p, plan, acc[0], tile);
      smem.ring.template sum<most>(acc, started, at, count);
      store(p, acc[0], tile, smem);
    }
  }

  static __device__ void run(Params const& p) {
    extern __shared__ __align__(1024) char memory[];
    auto& smem = *reinterpret_cast<SharedStorage*>(memory);
    if (threadIdx.x == 0) {
      prefetch(p.weight);
      prefetch(p.a_map);
      smem.ring.init(/*arrivals=*/1);
    }
    __syncthreads();
    Plan const plan = smem.planner.sort_in_warp(p.sort);
    if (warp_index() == kConsumerWarps) {
      produce(p, smem.ring, plan);
    } else {
      consume(p, smem, plan);
    }
  }

 private:
  static __device__ void consumers_barrier() { named_barrier(1, 32 * kConsumerWarps); }
};

template <class T, int most>
__global__ void __launch_bounds__(kPlanThreads, kAtOnce) token_sum_kernel(
    __grid_constant__ typename TokenSumKernel<T, most>::Params const p) {
  TokenSumKernel<T, most>::run(p);
}

}  // namespace guild::cuda::sm90
