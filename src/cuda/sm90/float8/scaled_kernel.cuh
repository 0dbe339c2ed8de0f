// The grouped product of FP8 codes: kernel.cuh's tiles, loads and warp roles with another sum.
//
// A step is 128 deep, as deep as a block of scales. Its products of 64 rows and 128 columns, a
// wave, go to 64 registers of their own, from which they are added to the tile's sums, scaled by
// the product of the row's and the weight block's scales ("promotion": DeepSeek-V3,
// arXiv:2412.19437, section 3.3.2). While one consumer adds, the other one's wave keeps the tensor
// cores busy.
//
// The loaders see two codes as one element of two bytes.
#pragma once
#include "cuda/sm90/kernel.cuh"
#include "guild/float8.h"

namespace guild::cuda {

// StoreRows without a rest that waits for the next tile: its registers are the waves' here.
template <class T>
struct StoreRowsAtOnce {
  StoreRows<T> rows;

  using Storage = StoreBoxes;
  template <int n>
  struct Parcel {
    static constexpr int kMostSteps = 0;

    __device__ bool left() const { return false; }
    __device__ void begin(StoreRowsAtOnce const& e, float const (&acc)[n / 2], StoreBoxes& boxes,
                          Tile const& tile, int thread) {
      if (tile.rows <= 0) return;
      put<0>(e, acc, boxes, tile, thread);
      if (n > 128 && tile.col + 128 < e.rows.width()) put<1>(e, acc, boxes, tile, thread);
    }
    __device__ void step(StoreRowsAtOnce const&, StoreBoxes&, int) {}

   private:
    template <int half>
    static __device__ void put(StoreRowsAtOnce const& e, float const (&acc)[n / 2],
                               StoreBoxes& boxes, Tile const& tile, int thread) {
      HalfWords word;
#pragma unroll
      for (int i = 0; i < 2; ++i) pack_box<T>(word[i], acc + 64 * half + 32 * i);
      e.rows.template put<n>(word, half, boxes, tile, thread);
    }
  };

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }
};

template <GemmConfig C, OperandLoader Loader, class Epilogue, Codes codes>
struct ScaledProduct : GroupedProduct<C, Loader, Epilogue> {
  using Base = GroupedProduct<C, Loader, Epilogue>;
  using typename Base::Cursor, typename Base::Loop, typename Base::SharedStorage;
  static_assert(!C.in_turns && C.consumer_rows() == 64);

  struct Params : Base::Params {
    ConstScales a_scales, b_scales;
    int rows, n_blocks;  // of A, and blocks of scales in a column of B
  };

  static constexpr int kWaves = C.tile_n / 128;
  static_assert(kWaves <= 2);

  // A thread's scales of one step: of its two rows, and of a wave's weight block, which even lanes
  // have of the first wave and odd ones of the second. A value that is the same for all lanes would
  // go to a uniform register, for which ptxas waits before the step's products are issued.
  struct StepScales {
    float row[2], block;
  };
  struct ScaleReader {
    float const *row, *block;
    int64_t row_step, block_step;
    int64_t second_row;

    __device__ ScaleReader(Params const& p, Tile const& tile, Self self) {
      int const r = tile.row + 64 * self.group + fragment_row(self.thread), last = p.rows - 1;
      int64_t const first = min(r, last) * p.a_scales.row_stride;
      second_row = min(r + 8, last) * p.a_scales.row_stride - first;
      row = p.a_scales.data + first;
      row_step = p.a_scales.col_stride;
      int const column = tile.col / 128 + (kWaves == 2 ? self.thread % 2 : 0);
      block = p.b_scales.data + tile.expert * p.b_scales.expert_stride +
              min(column, p.n_blocks - 1) * p.b_scales.row_stride;
      block_step = p.b_scales.col_stride;
    }
    __device__ void advance() { row += row_step, block += block_step; }
    __device__ StepScales load() const {
      return {{load_now(row), load_now(row + second_row)}, load_now(block)};
    }
    // Issued here: the compiler would move the load to where the value is used, two steps later.
    static __device__ float load_now(float const* from) {
      float value;
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
      return value;
    }
  };

  using Wave = float[64];

  static __device__ void multiply(Wave& wave, uint32_t a, uint32_t b) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < 4; ++slice) {
      mma_codes<codes>(wave, a + slice * 2, b + slice * 2, slice > 0);
    }
    wgmma_commit();
  }

  static __device__ void promote(float* sums, Wave const& wave, float upper, float lower) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = fmaf(wave[i], i % 4 < 2 ? upper : lower, sums[i]);
  }

  // Sums the tile over its steps; meanwhile() as in kernel.cuh. Scales are loaded two steps ahead.
  template <class F>
  static __device__ void sum(Params const& p, float (&sums)[C.tile_n / 2], Cursor& at,
                             Tile const& tile, SharedStorage& smem, Self self, F&& meanwhile) {
    int const count = Loop::steps(tile);
    uint32_t const full = kept(shared_address(smem.full));
    uint32_t const a =
        kept(descriptor<Major::K>(shared_address(smem.a[0]) + self.group * kBlockBytes));
    uint32_t const b = kept(descriptor<Major::K>(shared_address(smem.b[0])));
    ScaleReader reader(p, tile, self);
    StepScales now = reader.load();
    if (count > 1) reader.advance();
    StepScales next = reader.load();
    clear_registers(sums);
    int step = 0;
    do {
      if (step + 2 < count) reader.advance();
      StepScales const after = reader.load();
      float const block[2] = {__shfl_sync(~0u, now.block, 0), __shfl_sync(~0u, now.block, 1)};
      Barrier::wait_at(full + at.stage * sizeof(Barrier), at.phase);
      Wave wave;
      forget_registers(wave);
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
        fence_registers(wave);
        multiply(wave, a + at.stage * (C.a_bytes() / 16),
                 b + at.stage * (C.b_bytes() / 16) + w * (2 * kBlockBytes / 16));
        if (w == 0) meanwhile(Loop::kClaimsLate ? step + 1 == count : step == 0);
        wgmma_wait<0>();
        fence_registers(wave);
        if (w == kWaves - 1 && self.leads_warp()) Loop::release(smem.empty[at.stage]);
        promote(sums + 64 * w, wave, now.row[0] * block[w], now.row[1] * block[w]);
      }
      now = next;
      next = after;
      at.advance();
    } while (++step < count);
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Self self) {
    float sums[C.tile_n / 2];
    auto& storage = smem.epilogue[self.group];
    Cursor at;
    QueueEnd tiles;
    Tile tile, following;
    for (bool more = smem.tiles.take(tiles, tile); more; tile = following) {
      Tile const part = row_block(tile, self.group);
      if (part.rows <= 0) {
        Loop::pass(Loop::steps(tile), at, smem, self);
        more = smem.tiles.take(tiles, following);
        continue;
      }
      sum(p, sums, at, tile, smem, self, [&](bool takes) {
        if (takes) more = smem.tiles.take(tiles, following);
      });
      typename Epilogue::template Parcel<C.tile_n> parcel;
      parcel.begin(p.epilogue, sums, storage, part, self.thread);
    }
    if (self.leads_warp()) tma_store_wait<0>();  // shared memory must outlive the last store
  }

  static __device__ void run(Params const& p, SharedStorage& smem) {
    Base::run(p, smem, [&](Self self) { consume(p, smem, self); });
  }
};

}  // namespace guild::cuda
