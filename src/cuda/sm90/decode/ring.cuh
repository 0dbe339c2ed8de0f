// The pipeline of the few-token kernels: a ring of stages for weights and rows of X, and the main
// loop.
#pragma once
#include "cuda/arch/copy.cuh"
#include "cuda/arch/l2.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/tile_queue.cuh"
#include "cuda/warp.cuh"

namespace guild::cuda::sm90 {

// Resident blocks per SM, of one product or of two: the next product fills its rings while this one
// drains.
inline constexpr int kAtOnce = 2;

// tokens: the most rows of X in a tile. rows: rows of the weight in a tile, at most 128. A stage
// holds as many 64-deep steps as fit into `staged` rows of weights.
struct DecodeShape {
  int tokens, rows, staged = 128;

  constexpr int parts() const { return (rows + 63) / 64; }          // accumulators, of 64 rows each
  constexpr int steps() const { return staged / rows; }             // of a stage
  constexpr int step_bytes() const { return rows * kRowBytes; }     // weights of a step
  constexpr int token_bytes() const { return tokens * kRowBytes; }  // rows of X of a step
  constexpr int weight_bytes() const { return steps() * step_bytes(); }  // of a stage
  constexpr int stage_bytes() const { return steps() * (step_bytes() + token_bytes()); }
};

inline constexpr int kConsumerWarps = 4;

// Rows of X that are loaded for a tile: a multiple of 8. Results for other rows are ignored.
__device__ inline int loaded_rows(Tile const& tile) { return (tile.rows + 7) / 8 * 8; }

// Loads a box that is read once. policy: evict_first(), which keeps other kernels' data in L2.
__device__ inline void tma_load_once(CUtensorMap const& map, void* to, Coordinate at, Barrier& done,
                                     uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(at.x), "r"(at.y), "r"(at.z), "l"(policy)
      : "memory");
}
// The same for a whole stage by stage_map(), or one by group_map() of stage_map.h, where `row`
// counts eights.
struct StageCoordinate {
  int row, step, expert;
};
enum class StageBox { stage, group };
template <StageBox box = StageBox::stage>
__device__ inline void tma_load_stage(CUtensorMap const& map, void* to, StageCoordinate at,
                                      Barrier& done, uint64_t policy) {
  constexpr bool by_group = box == StageBox::group;
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(0), "r"(by_group ? 0 : at.row),
      "r"(by_group ? at.step : 0), "r"(by_group ? at.row : at.step), "r"(at.expert), "l"(policy)
      : "memory");
}

// wgmma reads 64 rows at a time. Where a tile has fewer, it reads what follows in shared memory,
// and those results are ignored. It reads up to this many bytes past the last stage.
constexpr int read_after(DecodeShape s) { return s.parts() * kBlockBytes - s.step_bytes(); }

// The same for stages loaded by group_map(), where consecutive groups of eight rows lie all of a
// stage's steps apart.
constexpr int group_bytes(DecodeShape s) { return s.steps() * 8 * kRowBytes; }
constexpr int read_after_groups(DecodeShape s) {
  return std::max(0, s.parts() * 8 * group_bytes(s) - s.stage_bytes());
}

// mma_slice() with `apart` bytes between a's groups of eight rows.
template <class T, int n, Major major, int apart>
__device__ inline void mma_groups(float (&acc)[n / 2], uint32_t a, uint32_t b, bool accumulate) {
  using namespace cute::SM90::GMMA;
  using Instruction = typename MmaInstruction<T, n, major, Major::K>::type;
  constexpr uint64_t moved = uint64_t(apart - 1024) / 16 << 32;
  auto const scale = accumulate ? ScaleOut::One : ScaleOut::Zero;
  [&]<size_t... i>(std::index_sequence<i...>) {
    Instruction::fma(whole_descriptor(a) + moved, whole_descriptor(b), acc[i]..., scale);
  }(std::make_index_sequence<n / 2>{});
}

// Stages of a block where `at_once` blocks share a multiprocessor.
constexpr int stages_of_block(int stage_bytes, int at_once) {
  return 204 * 1024 / at_once / stage_bytes;
}

// In shared memory, for one shape or several. A stage begins with its weights.
template <int stage_bytes>
struct RingStage {
  alignas(1024) char weight[stage_bytes];
  template <DecodeShape S>
  __device__ char* x(int step) {
    return weight + S.weight_bytes() + step * S.token_bytes();
  }
};

// Where a thread is in a ring of `stages`.
struct RingCursor {
  int const stages;
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ int last() const { return (stage == 0 ? stages : stage) - 1; }
};

// The barriers of a ring of `most` stages or fewer, which lie elsewhere in shared memory.
template <class Stage, int most>
struct Ring {
  Barrier full[most], empty[most];

  // One thread. arrivals: of the producer's warp for a stage.
  __device__ void init(int arrivals) {
#pragma unroll
    for (int i = 0; i < most; ++i) {
      full[i].init(arrivals);
      empty[i].init(kConsumerWarps);
    }
    fence_barrier_init();
  }

  // The consumers: sums `count` of the stages that begin at `first`, from the accumulators' values
  // on if `started`. grouped: the weights came by group_map().
  template <class T, DecodeShape S, Major major, int width, bool grouped = false>
  __device__ void sum(float (&acc)[S.parts()][width / 2], bool started, Stage* first,
                      RingCursor& at, int count) {
    // Whether consumers release a stage before they wait for the next one. If not, one stage less
    // is in flight, but short products overlap.
    constexpr bool kFreesAtOnce = width < 64;
    constexpr int step_a = kSliceBytes<major> / 16, step_b = kSliceBytes<Major::K> / 16;
    constexpr int apart = grouped ? group_bytes(S) : 8 * kRowBytes;
    constexpr int step_bytes = grouped ? 8 * kRowBytes : S.step_bytes();
    bool const leads = threadIdx.x % 32 == 0;
    uint32_t const stage0 = kept(shared_address(first));
    int i = 0;
    do {
      full[at.stage].wait(at.phase);
      uint32_t const base = stage0 + at.stage * uint32_t(sizeof(Stage));
      uint32_t const a = descriptor<major>(base);
      uint32_t const b = descriptor<Major::K>(base + S.weight_bytes());
#pragma unroll
      for (auto& part : acc) fence_registers(part);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4 * S.steps(); ++slice) {
        int const step = slice / 4, within = slice % 4;
#pragma unroll
        for (int part = 0; part < S.parts(); ++part) {
          mma_groups<T, width, major, apart>(
              acc[part], a + (step * step_bytes + part * 8 * apart) / 16 + within * step_a,
              b + step * (S.token_bytes() / 16) + within * step_b, started || i > 0 || slice > 0);
        }
      }
      wgmma_commit();
      if constexpr (kFreesAtOnce) {
        finish(acc, at.stage);
      } else if (i > 0) {
        wgmma_wait<1>();
        if (leads) empty[at.last()].arrive();
      }
      at.advance();
    } while (++i < count);
    if constexpr (!kFreesAtOnce) finish(acc, at.last());
  }

 private:
  // Waits for the products and frees the last stage.
  template <int parts, int count>
  __device__ void finish(float (&acc)[parts][count], int last) {
    wgmma_wait<0>();
#pragma unroll
    for (auto& part : acc) fence_registers(part);
    if (threadIdx.x % 32 == 0) empty[last].arrive();
  }
};

}  // namespace guild::cuda::sm90
