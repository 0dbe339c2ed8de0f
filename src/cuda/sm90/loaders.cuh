// Loaders: how the producer fills a stage, one 64-deep step of A and B.
//
//   TmaRows        A: contiguous rows, TMA boxes issued by one thread
//   GatheredRows   A: rows gathered by index, 16-byte cp.async by the whole warpgroup
//   TokenColumns   ragged inner dimension: A and B are (rows of the group) x features, A optionally
//                  gathered by index. Rows missing in a group's last step are zeros in A and B
//
// Gather by cp.async in the producer: SonicMoE, arXiv:2512.14080, section 4.
#pragma once
#include <concepts>

#include "cuda/alignment.h"
#include "cuda/arch/cluster.cuh"
#include "cuda/arch/copy.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/element.cuh"
#include "shared/gemm_config.h"
#include "shared/tiles.h"

namespace guild::cuda {

static_assert(GemmConfig::tile_k == kBoxColumns);

// What kernel.cuh requires of a loader:
//
//   Element              the type of A and B
//   Work                 the tile walk: RowTiles or InnerTiles
//   Params, Storage      kernel arguments; the loader's shared memory, an empty struct if none
//   kMajorA, kMajorB     layout of the operands in a stage
//   kThreads             loading threads: the first 32 or 128 of the block
//   kRegisters           registers for each of the block's first 128 threads. All threads start
//                        with 168; the consumers get what these give up
//   kArrivals            arrivals on `full` per stage, over all threads
//   kClearsRest          whether rows of A past the tile's end are zeros, up to a multiple of 64.
//                        If not, they may hold anything
//   begin(tile)          called by each loading thread before the tile's first step
//   load(tile, step, a, b, full)
//                        called by each loading thread once the stage is empty: fills a and b, and
//                        arrives on `full` at once or when its copies have landed
template <class L>
concept OperandLoader = requires(L loader, Tile const& tile, char* stage, Barrier& full, int i) {
  typename L::Element;
  typename L::Work;
  typename L::Params;
  typename L::Storage;
  { L::kMajorA } -> std::convertible_to<Major>;
  { L::kMajorB } -> std::convertible_to<Major>;
  { L::kThreads } -> std::convertible_to<int>;
  { L::kRegisters } -> std::convertible_to<int>;
  { L::kArrivals } -> std::convertible_to<int>;
  { L::kClearsRest } -> std::convertible_to<bool>;
  loader.begin(tile);
  loader.load(tile, i, stage, stage, full);
};

// Calls load(c, multicast) for each box of B that this block loads: `width` columns of the tile
// from column c on. In a cluster each block loads its share of B and multicasts it to all; where
// the blocks split the tile by columns (tile.apart), each loads all of its own B.
template <GemmConfig C, int width, class F>
__device__ inline void for_own_boxes(Tile const& tile, F&& load) {
  constexpr int share = C.tile_n / C.cluster;
  static_assert(share % width == 0);
  if (C.cluster > 1 && !tile.apart) {
    int const first = cluster_rank() * share;
#pragma unroll
    for (int c = 0; c < share; c += width) load(first + c, std::true_type());
  } else {
#pragma unroll
    for (int c = 0; c < C.tile_n; c += width) load(c, std::false_type());
  }
}

template <GemmConfig C, class Multicast>
__device__ inline void load_b(Multicast, CUtensorMap const& map, char* to, Coordinate at,
                              Barrier& full) {
  if constexpr (Multicast::value) {
    tma_load_multicast(map, to, at, full, (1 << C.cluster) - 1);
  } else {
    tma_load(map, to, at, full);
  }
}

template <GemmConfig C, class Multicast>
__device__ inline void load_clipped(Multicast, CUtensorMap const& map, char* to,
                                    ClippedCoordinate at, Barrier& full) {
  if constexpr (Multicast::value) {
    tma_load_clipped_multicast(map, to, at, full, (1 << C.cluster) - 1);
  } else {
    tma_load_clipped(map, to, at, full);
  }
}

// Expert weights as B: (E, n, k) K-major or (E, k, n) MN-major. Gate and up have a map each: the
// two column halves of the tile (pair_columns) or the two halves of the sum (half_steps). The maps'
// third coordinate is the expert or, for matrices at arbitrary addresses, expert_at[expert], which
// the issuing thread reads before each load; nobody waits for that stage yet.
template <GemmConfig C, Major major>
struct WeightLoader {
  CUtensorMap map[2];
  bool pair_columns;  // the second half of the tile's columns comes from map[1], same columns
  int half_steps;     // the sum's steps over map[0], before those over map[1]
  int32_t const* expert_at[2];  // of each map; null: the expert itself

  static constexpr int kHalf = C.tile_n / 2;

  __device__ void load(Tile const& tile, int step, char* to, Barrier& full) const {
    constexpr int width = major == Major::K ? kHalf : 64;
    int const half = step >= half_steps;
    int const k = (step - half * half_steps) * C.tile_k;
    for_own_boxes<C, width>(tile, [&](int c, auto multicast) {
      bool const second = pair_columns && c >= kHalf;
      int const which = half | int(second);
      int const n = tile.col + c - (second ? kHalf : 0), e = placed(expert_at[which], tile.expert);
      Coordinate const at = major == Major::K ? Coordinate{k, n, e} : Coordinate{n, k, e};
      load_b<C>(multicast, map[which], to + c * kRowBytes, at, full);
    });
  }
};

// Loads the tile's rows of A from column k on, in boxes of 64 rows. Boxes without rows are skipped:
// no consumer reads them.
template <GemmConfig C>
__device__ inline void load_rows(CUtensorMap const& map, int k, int half, Tile const& tile, char* a,
                                 Barrier& full) {
#pragma unroll 1
  for (int r = 0; r < tile.rows; r += 64) {
    tma_load(map, a + r * kRowBytes, {k, half, tile.row + r}, full);
  }
}
// The bytes that load_rows() and WeightLoader load. A block without rows of a tile needs no B.
template <GemmConfig C>
__device__ inline int stage_bytes(Tile const& tile) {
  return tile.rows <= 0 ? 0 : (tile.rows > 64 ? C.a_bytes() : kBlockBytes) + C.b_bytes();
}

template <class T, GemmConfig C, Major major_b>
struct TmaRows {
  using Element = T;
  using Work = RowTiles;
  static constexpr Major kMajorA = Major::K, kMajorB = major_b;
  static constexpr int kThreads = 32, kArrivals = 1, kRegisters = 40;
  static constexpr bool kClearsRest = false;

  struct Params {
    CUtensorMap a;  // (k, halves, rows), boxes of 64 x 1 x 64
    WeightLoader<C, major_b> b;
  };
  struct Storage {};
  Params const& p;
  int const thread;

  __device__ TmaRows(Params const& p, Storage&, int thread) : p(p), thread(thread) {}
  __device__ void begin(Tile const&) {}
  __device__ void load(Tile const& tile, int step, char* a, char* b, Barrier& full) {
    if (thread != 0) return;
    full.arrive_expect(stage_bytes<C>(tile));
    int const half = step >= p.b.half_steps;
    load_rows<C>(p.a, (step - half * p.b.half_steps) * C.tile_k, half, tile, a, full);
    if (tile.rows > 0) p.b.load(tile, step, b, full);
  }
};

template <class T, GemmConfig C, Major major_b>
struct GatheredRows {
  using Element = T;
  using Work = RowTiles;
  static constexpr Major kMajorA = Major::K, kMajorB = major_b;
  static constexpr int kThreads = 128, kRegisters = 40;
  static constexpr bool kClearsRest = true;
  static constexpr int kArrivals = kThreads + 1;  // every thread's copies, and TMA of B

  struct Params {
    T const* a;          // (tokens, k)
    uint32_t stride;     // 16 bytes from token to token
    int32_t const* row;  // (rows of D) which row of a
    int tokens, k;
    WeightLoader<C, major_b> b;
  };
  static constexpr int kPasses = C.tile_m / 16;
  static_assert(kPasses == 8, "a warp copies 32 rows: each lane loads the token of one");

  struct Storage {};
  Params const& p;
  int const thread;
  // Where the rows that this thread copies begin, in units of 16 bytes; kNone past the last row.
  // Between begin() and step 0, from[0] holds the token index of one of the warp's rows, so that
  // loading it overlaps with the wait for the stage.
  uint32_t from[kPasses];

  __device__ GatheredRows(Params const& p, Storage&, int thread) : p(p), thread(thread) {}

  __device__ void begin(Tile const& tile) {
    int const r = thread / 32 * 4 + thread % 4 + thread % 32 / 4 * 16;
    from[0] = r < tile.rows ? uint32_t(p.row[tile.row + r]) : kNone;
  }

  __device__ void load(Tile const& tile, int step, char* a, char* b, Barrier& full) {
    if (step == 0) place();
    int const k = step * C.tile_k;
    int const column = thread % 8 * kElementsPer16Bytes;
    T const* const base = p.a + k + column;
    uint32_t const none = k + column < p.k ? kNone : 0;  // at or above it: nothing to copy
    uint32_t const to =
        shared_address(a) + thread / 8 * kRowBytes + ((thread % 8 ^ thread / 8 % 8) * 16);
    // 64 rows at a time; no consumer reads blocks of 64 that do not exist.
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (i % 4 == 0 && 16 * i >= tile.rows) break;
      copy_async(to + i * 16 * kRowBytes, units_after(base, from[i]), from[i] < none);
    }
    if (thread == 0) {
      full.arrive_expect(tile.rows > 0 ? C.b_bytes() : 0);
      if (tile.rows > 0) p.b.load(tile, step, b, full);
    }
    full.arrive_when_copied();
  }

 private:
  __device__ void place() {
    uint32_t const start = from[0] < unsigned(p.tokens) ? from[0] * p.stride : kNone;
    int const first = int(kept(thread % 32 / 8));  // else all 8 source lanes are kept
#pragma unroll
    for (int i = 0; i < kPasses; ++i) from[i] = __shfl_sync(~0u, start, first + 4 * i);
  }
};

template <class T, GemmConfig C>
struct TokenColumns {
  using Element = T;
  using Work = InnerTiles;
  static constexpr Major kMajorA = Major::MN, kMajorB = Major::MN;
  static constexpr int kThreads = 128, kRegisters = 72;
  static constexpr bool kClearsRest = true;
  static constexpr int kArrivals = kThreads + 1;  // every thread's copies, and TMA

  struct Params {
    int32_t const* row;  // (rows) which row of a; null: a_map's same row, and no a
    T const* a;          // (tokens, m)
    uint32_t a_stride;   // 16 bytes from row to row
    int tokens, m;
    CUtensorMap a_map, b_map;  // clipped_map() of (rows, m) and (rows, n)
  };
  static_assert(C.tile_m == 128 && C.tile_k == 64, "half a warp copies a row of A, a warp 16 rows");
  // Each warp's ring of token buffers, a pair of steps each.
  static constexpr int kTokenBuffers = 4;
  struct Storage {
    int token[kThreads / 32][kTokenBuffers][32];
  };
  // Token indices are loaded this many steps ahead. By the time they are used, the stage of the
  // step that loaded them has been filled and released, so all of that step's copies, indices
  // included, have landed.
  static constexpr int kTokensAhead = 4;
  static_assert(kTokensAhead >= C.stages && kTokensAhead / 2 < kTokenBuffers);

  Params const& p;
  int const thread;
  uint32_t const tokens;  // shared-memory address of the lane's token in the first buffer
  // The gather is bound by instruction issue, five per row. So row addresses, in units of 16 bytes,
  // are computed once per pair of steps, one row per lane: lane l holds that of the warp's row l %
  // 16 in the even (l < 16) or odd step. Token indices go through shared memory: the compiler would
  // wait for a load to registers at the end of each iteration.
  uint32_t start;

  __device__ TokenColumns(Params const& p, Storage& storage, int thread)
      : p(p), thread(thread), tokens(shared_address(&storage.token[thread / 32][0][thread % 32])) {}

  __device__ void begin(Tile const& tile) {
    if (p.row == nullptr) return;
    int token[kTokensAhead / 2 + 1];
#pragma unroll
    for (int pair = 0; pair <= kTokensAhead / 2; ++pair) {
      int const r = row_of(2 * pair);
      token[pair] = r < tile.inner ? p.row[tile.inner_row + r] : 0;
    }
#pragma unroll
    for (int pair = 0; pair <= kTokensAhead / 2; ++pair) {
      store_shared(buffer(2 * pair), token[pair]);
    }
    start = place(tile, 0);
  }

  __device__ void load(Tile const& tile, int step, char* a, char* b, Barrier& full) {
    // `left` is always positive, but makes the branch depend on the step. Without it ptxas emits a
    // second loop for A without a gather, and treats the warps of both loops as diverged.
    int const left = tile.inner - step * C.tile_k;
    bool const a_by_tma = left > 0 && p.row == nullptr;
    if (thread == 0) {
      full.arrive_expect(C.b_bytes() + (a_by_tma ? C.a_bytes() : 0));
      // TMA fills the rows missing in the last step with zeros.
      int const r = kClip - left, end = tile.inner_row + tile.inner;
      for_own_boxes<C, 64>(tile, [&](int c, auto multicast) {
        load_clipped<C>(multicast, p.b_map, b + c * kRowBytes, {tile.col + c, r, end}, full);
      });
      if (a_by_tma) {
#pragma unroll
        for (int c = 0; c < C.tile_m; c += 64) {
          tma_load_clipped(p.a_map, a + c * kRowBytes, {tile.row + c, r, end}, full);
        }
      }
    }
    __syncwarp();
    if (!a_by_tma) {
      copy_a(tile, step, a);
      if (step % 2 == 1) {
        load_tokens(tile, step + 1 + kTokensAhead);
        start = place(tile, step + 1);
      }
    }
    full.arrive_when_copied();
  }

 private:
  // The row, counted from the tile's first, whose address the lane computes for steps `even` and
  // even + 1. Warp w copies rows 2 w and 2 w + 1 of every 8, so that a thread's rows share a
  // swizzle.
  __device__ int row_of(int even) const {
    int const lane = thread % 32;
    return (even + lane / 16) * C.tile_k + thread / 32 * 2 + lane % 2 + lane % 16 / 2 * 8;
  }
  __device__ uint32_t buffer(int even) const { return tokens + even / 2 % kTokenBuffers * 128; }

  __device__ void load_tokens(Tile const& tile, int even) const {
    int const r = row_of(even);
    if (r < tile.inner) {
      copy_word_async(buffer(even), p.row + tile.inner_row + r);
    }
  }
  __device__ uint32_t place(Tile const& tile, int even) const {
    int const r = row_of(even);
    int const token = load_shared(buffer(even));
    bool const inside = r < tile.inner && unsigned(token) < unsigned(p.tokens);
    return inside ? uint32_t(token) * p.a_stride : kNone;
  }

  __device__ void copy_a(Tile const& tile, int step, char* a) const {
    int const lane = thread % 32, chunk = lane % 16, m = tile.row + chunk * kElementsPer16Bytes;
    uint32_t const to =
        chunk_address(shared_address(a) + chunk / 8 * kBlockBytes, thread / 16, chunk % 8);
    uint32_t const none = m < p.m ? kNone : 0;  // at or above it: nothing to copy
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t const row = __shfl_sync(~0u, start, step % 2 * 16 + 2 * i + lane / 16);
      copy_async(to + i * 1024, units_after(p.a + m, row), row < none);
    }
  }
};

}  // namespace guild::cuda
