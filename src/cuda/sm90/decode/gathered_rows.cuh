// The rows of X of a tile, gathered by cp.async: DecodeProduct's.
#pragma once
#include "cuda/arch/copy.cuh"
#include "cuda/sm90/decode/plan.cuh"
#include "cuda/sm90/decode/results.cuh"
#include "cuda/sm90/decode/ring.cuh"
#include "cuda/sm90/tile_queue.cuh"

namespace guild::cuda::sm90 {

// Where a lane's rows of X begin: row lane / 8 + 4 i of the tile.
template <DecodeShape S>
struct GatheredRows {
  static constexpr int kMost = S.tokens / 4;
  uint32_t from[kMost];
  int token[(S.tokens + 31) / 32];  // of row lane + 32 i

  // Starts to load what begin() will need: the latency of busy memory is high.
  template <class Params>
  __device__ void find(Params const& p, Plan const& plan, Tile const& tile) {
#pragma unroll
    for (int i = 0; i < (S.tokens + 31) / 32; ++i) {
      int const r = threadIdx.x % 32 + 32 * i;
      token[i] = -1;
      if (r >= tile.rows) continue;
      token[i] = tile.expert == kSharedExpert ? tile.row + r
                 : plan.token != nullptr      ? plan.token[tile.row + r]
                                              : p.row_token[tile.row + r];
    }
  }
  template <class Params>
  __device__ void begin(Params const& p) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      int const lane = (threadIdx.x % 32 / 8 + 4 * i) % 32;
      int const found = __shfl_sync(~0u, token[i / 8], lane);
      from[i] = unsigned(found) < unsigned(p.tokens) ? uint32_t(found) * p.stride : kNone;
    }
  }
  template <class Params, class Stage>
  __device__ void load(Params const& p, Stage& stage, Tile const& tile, int index) const {
    int const lane = threadIdx.x % 32, rows = loaded_rows(tile);
#pragma unroll
    for (int s = 0; s < S.steps(); ++s) {
      int const k = 64 * (index * S.steps() + s) + lane % 8 * kElementsPer16Bytes;
      uint32_t const none = k < p.k ? kNone : 0, to = shared_address(stage.template x<S>(s));
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (4 * i >= rows) break;
        copy_async(chunk_address(to, lane / 8 + 4 * i, lane % 8), units_after(p.x + k, from[i]),
                   from[i] < none);
      }
    }
  }
};

}  // namespace guild::cuda::sm90
