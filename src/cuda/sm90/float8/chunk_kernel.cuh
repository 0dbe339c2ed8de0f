// The weight gradients of FP8 chunks (guild/float8_chunks.h): kernel.cuh's tiles and warp roles,
// one chunk per step.
//
// A stage holds one chunk of both operands, 128 rows deep and K-major, as in memory, so every box
// is whole. Its 64 x 128 products accumulate in 64 separate registers and are added to the tile's
// sums, scaled by the product of the two blocks' scales, one factor for all of them.
//
// TMA sees two codes as one two-byte element.
#pragma once
#include "cuda/sm90/float8/store_at_once.cuh"
#include "cuda/sm90/float8/warp_rows.cuh"
#include "cuda/sm90/kernel.cuh"
#include "guild/float8_chunks.h"

namespace guild::cuda {

// Groups split the sum into chunks. A tile's inner_row is the slot of its group's first chunk;
// `inner` counts pairs of codes.
struct ChunkTiles : InnerTiles {
  GUILD_HD Tile at(int index, int group, int begin, int end) const {
    Tile tile = InnerTiles::at(index, group, begin, end);
    tile.inner = (end - begin) / 2 + (end - begin) % 2;
    tile.inner_row = begin / int(kScaleBlock) + group;
    return tile;
  }
};

// Loads a chunk's columns as rows of 128 bytes: 64 pairs of codes.
template <GemmConfig C>
struct ChunkColumns {
  using Element = __nv_bfloat16;
  using Work = ChunkTiles;
  static constexpr Major kMajorA = Major::K, kMajorB = Major::K;
  static constexpr int kThreads = 32, kArrivals = 1, kRegisters = 40;
  static constexpr bool kClearsRest = false;
  static constexpr int kBoxRows = C.tile_n / C.cluster > 128 ? 128 : C.tile_n / C.cluster;

  struct Params {
    CUtensorMap a, b;  // (64, columns, slots), boxes of 64 x 64 of A, 64 x kBoxRows of B
  };
  struct Storage {};
  Params const& p;
  int const thread;

  __device__ ChunkColumns(Params const& p, Storage&, int thread) : p(p), thread(thread) {}
  __device__ void begin(Tile const&) {}
  __device__ void load(Tile const& tile, int step, char* a, char* b, Barrier& full) {
    if (thread != 0) return;
    full.arrive_expect(stage_bytes<C>(tile));
    if (tile.rows <= 0) return;
    int const slot = tile.inner_row + step;
#pragma unroll 1
    for (int r = 0; r < tile.rows; r += 64) {
      tma_load(p.a, a + r * kRowBytes, {0, tile.row + r, slot}, full);
    }
    for_own_boxes<C, kBoxRows>(tile, [&](int c, auto multicast) {
      load_b<C>(multicast, p.b, b + c * kRowBytes, {0, tile.col + c, slot}, full);
    });
  }
};

template <GemmConfig C, class Epilogue, Codes codes>
struct ChunkSums : GroupedProduct<C, ChunkColumns<C>, Epilogue> {
  using Base = GroupedProduct<C, ChunkColumns<C>, Epilogue>;
  using typename Base::Cursor, typename Base::Loop, typename Base::SharedStorage;
  static_assert(!C.in_turns && C.consumer_rows() == 64);

  struct Params : Base::Params {
    ConstScales a_scales, b_scales;
    int b_blocks;     // blocks of columns of B
    bool accumulate;  // groups without rows are left alone
  };

  static constexpr int kWaves = C.tile_n / 128;
  static_assert(kWaves <= 2);
  using Wave = float[64];

  // The scales of one step: A's, and that of a wave's block of B, the first wave's in even lanes
  // and the second's in odd lanes. A value that all lanes load from one address would go to a
  // uniform register, and ptxas waits for it before it issues the step's products.
  struct StepScales {
    float a, b;
  };
  // Offsets of 32 bits (require.h), and strides read from the parameters: registers are scarce.
  struct ScaleReader {
    uint32_t a, b;

    __device__ ScaleReader(Params const& p, Tile const& tile, Self self) {
      int const column = tile.col / int(kScaleBlock) + (kWaves == 2 ? self.thread % 2 : 0);
      a = uint32_t(tile.inner_row) * uint32_t(p.a_scales.row_stride) +
          uint32_t(tile.row / int(kScaleBlock)) * uint32_t(p.a_scales.col_stride);
      b = uint32_t(tile.inner_row) * uint32_t(p.b_scales.row_stride) +
          uint32_t(min(column, p.b_blocks - 1)) * uint32_t(p.b_scales.col_stride);
    }
    __device__ void advance(Params const& p) {
      a += uint32_t(p.a_scales.row_stride);
      b += uint32_t(p.b_scales.row_stride);
    }
    __device__ StepScales load(Params const& p) const {
      return {load_now(p.a_scales.data + a), load_now(p.b_scales.data + b)};
    }
  };

  static constexpr int kSlices = int(kScaleBlock) / 32;  // of a chunk: products are 32 rows deep

  static __device__ void multiply(Wave& wave, uint32_t a, uint32_t b) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      mma_codes<codes>(wave, a + slice * 2, b + slice * 2, slice > 0);
    }
    wgmma_commit();
  }
  // Only the first `slices` of a chunk: in a group's last chunk the others may hold no rows.
  static __device__ void multiply_first(Wave& wave, uint32_t a, uint32_t b, int slices) {
    wgmma_fence();
    mma_codes<codes>(wave, a, b, false);
    wgmma_commit();
#pragma unroll 1
    for (int slice = 1; slice < slices; ++slice) {
      wgmma_fence();
      mma_codes<codes>(wave, a + slice * 2, b + slice * 2, true);
      wgmma_commit();
    }
  }

  static __device__ void promote(float* sums, Wave const& wave, float factor) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = fmaf(wave[i], factor, sums[i]);
  }

  // Sums the first `waves` x 128 columns of the tile over its `count` chunks, at least one. Scales
  // are loaded two steps ahead. A partial last chunk is added after the loop: a variable number of
  // slices inside it would make ptxas wait for each product of full chunks too.
  template <int waves>
  static __device__ void sum(Params const& p, int count, float (&sums)[C.tile_n / 2], Cursor& at,
                             Tile const& tile, SharedStorage& smem, Self self) {
    uint32_t const full = kept(shared_address(smem.full));
    uint32_t const a =
        kept(descriptor<Major::K>(shared_address(smem.a[0]) + self.group * kBlockBytes));
    uint32_t const b = kept(descriptor<Major::K>(shared_address(smem.b[0])));
    ScaleReader reader(p, tile, self);
    StepScales now = reader.load(p);
    if (count > 1) reader.advance(p);
    StepScales next = reader.load(p);
    auto const add_chunk = [&](auto&& multiply_wave) {
      float const both = now.a * now.b;
      float const factor[2] = {__shfl_sync(~0u, both, 0), __shfl_sync(~0u, both, 1)};
      Barrier::wait_at(full + at.stage * sizeof(Barrier), at.phase);
      Wave wave;
      forget_registers(wave);
#pragma unroll
      for (int w = 0; w < waves; ++w) {
        fence_registers(wave);
        multiply_wave(wave, a + at.stage * (C.a_bytes() / 16),
                      b + at.stage * (C.b_bytes() / 16) + w * (2 * kBlockBytes / 16));
        wgmma_wait<0>();
        fence_registers(wave);
        if (w == waves - 1 && self.leads_warp()) Loop::release(smem.empty[at.stage]);
        promote(sums + 64 * w, wave, factor[w]);
      }
      at.advance();
    };
    int const whole = max(tile.inner / C.tile_k, 1);
    int step = 0;
#pragma unroll 1
    do {
      if (step + 2 < count) reader.advance(p);
      StepScales const after = reader.load(p);
      add_chunk([](Wave& wave, uint32_t a, uint32_t b) { multiply(wave, a, b); });
      now = next;
      next = after;
    } while (++step < whole);
    if (whole < count) {
      int const slices = (tile.inner % C.tile_k + 15) / 16;  // `inner` counts pairs
      add_chunk([=](Wave& wave, uint32_t a, uint32_t b) { multiply_first(wave, a, b, slices); });
    }
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Self self) {
    float sums[C.tile_n / 2];
    auto& storage = smem.epilogue[self.group];
    Cursor at;
    QueueEnd tiles;
    Tile tile, following;
    if (!smem.tiles.take(tiles, tile)) return;
    for (;; tile = following) {
      Tile const part = row_block(tile, self.group);
      int const count = Loop::steps(tile);
      if (part.rows <= 0) {
        Loop::pass(count, at, smem, self);
      } else {
        clear_registers(sums);
        if (count > 0 && tile.col / int(kScaleBlock) + 1 < p.b_blocks) {
          sum<kWaves>(p, count, sums, at, tile, smem, self);
        } else if (count > 0) {
          sum<1>(p, count, sums, at, tile, smem, self);
        }
      }
      bool const more = smem.tiles.take(tiles, following);
      if (part.rows > 0 && (count > 0 || !p.accumulate)) {
        typename Epilogue::template Parcel<C.tile_n> parcel;
        parcel.begin(p.epilogue, sums, storage, part, self.thread);
      }
      if (!more) break;
    }
    if (self.leads_warp()) tma_store_wait<0>();  // shared memory must outlive the last store
  }

  static __device__ void run(Params const& p, SharedStorage& smem) {
    Base::run(p, smem, [&](Self self) { consume(p, smem, self); });
  }
};

}  // namespace guild::cuda
