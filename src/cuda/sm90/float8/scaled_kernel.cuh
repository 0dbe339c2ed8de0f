// The grouped product of FP8 codes: kernel.cuh's tiles, loaders and warp roles with another main
// loop.
//
// A step is 128 deep, as deep as a block of scales. Its 64 x 128 products, a wave, accumulate in 64
// separate registers, which are then scaled by the row's and the weight block's scales and added to
// the tile's sums ("promotion": DeepSeek-V3, arXiv:2412.19437, section 3.3.2). While one consumer
// promotes, the other's wave keeps the tensor cores busy.
//
// The loaders see two codes as one two-byte element.
#pragma once
#include "cuda/sm90/float8/quantized_chunks.cuh"
#include "cuda/sm90/float8/scale_copies.cuh"
#include "cuda/sm90/kernel.cuh"
#include "guild/float8.h"

namespace guild::cuda {

using CodePair = __nv_bfloat16;  // two codes, as the loaders and TMA see them

// What a reading epilogue's warps copy to shared memory before the sum.
template <class Epilogue>
struct AheadOf {
  struct Type {};
};
template <class Epilogue>
  requires requires { typename Epilogue::Ahead; }
struct AheadOf<Epilogue> {
  using Type = typename Epilogue::Ahead;
};

template <GemmConfig C, OperandLoader Loader, class Epilogue, Codes codes>
struct ScaledProduct : GroupedProduct<C, Loader, Epilogue> {
  using Base = GroupedProduct<C, Loader, Epilogue>;
  using typename Base::Cursor, typename Base::Loop;
  static_assert(!C.in_turns && C.consumer_rows() == 64);
  static constexpr int kWaves = C.tile_n / 128;
  static_assert(kWaves <= 2);
  // Of a warp's 16 rows, then of the waves' blocks of the weight.
  using Copies = ScaleCopies<16 + kWaves>;
  struct SharedStorage : Base::SharedStorage {
    typename Copies::Slots scales[8];  // of each warp
    // Of a reading epilogue.
    ChunkExchange exchange;
    typename AheadOf<Epilogue>::Type ahead[8];  // of each warp
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "too many stages for shared memory");

  struct Params : Base::Params {
    ConstScales a_scales;
    ConstScales b_scales;        // of the first weight that WeightLoader has
    float const* second_scales;  // with pair_columns those of the second, with the same strides
    int rows, n_blocks;          // of D, and blocks of scales in a column of B
  };

  static constexpr bool kGathers = requires(Params const& p) { p.load.row; };

  struct Scales : Copies {
    int row;  // of A, whose scale the lane copies; where A is gathered, still to arrive

    __device__ Scales(SharedStorage& smem, Self self)
        : Copies(smem.scales[4 * self.group + self.thread / 32]) {}

    __device__ void begin(Params const& p, Tile const& tile, Self self) {
      find_row(p, tile, self);
      begin_found(p, tile, self);
    }
    // begin() in two halves, so that the row can arrive in between.
    __device__ void find_row(Params const& p, Tile const& tile, Self self) {
      int const r = tile.row + 64 * self.group + self.thread / 32 * 16 + self.thread % 16;
      row = min(r, p.rows - 1);
      if constexpr (kGathers) row = load_now(p.load.row + row);
    }
    // A consumer without rows, and a tile with expert -1, have no steps.
    __device__ void begin_found(Params const& p, Tile const& tile, Self self) {
      int const lane = self.thread % 32;
      if (lane < 16) {
        if constexpr (kGathers) this->present = unsigned(row) < unsigned(p.load.tokens);
        this->from = p.a_scales.data + (this->present ? row * p.a_scales.row_stride : 0);
        this->stride = p.a_scales.col_stride;
      } else {
        bool const odd = lane % 2 == 1, second = odd && p.load.b.pair_columns;
        int const column = tile.col / 128 + int(odd && !second);
        this->from = (second ? p.second_scales : p.b_scales.data) +
                     tile.expert * p.b_scales.expert_stride +
                     min(column, p.n_blocks - 1) * p.b_scales.row_stride;
        this->stride = p.b_scales.col_stride;
      }
      bool const any = tile.expert >= 0 && row_block(tile, self.group).rows > 0;
      Copies::begin(any ? Loop::steps(tile) : 0, lane);
    }
    // Of rows r and r + 8 of the thread, and of the waves' blocks, for the next step. more: as in
    // advance().
    __device__ void take(float (&of_row)[2], float (&of_block)[kWaves], bool more, Self self) {
      int const lane = self.thread % 32;
      uint32_t const at = this->ready(), first = at + lane / 4 * sizeof(float);
#pragma unroll
      for (int i = 0; i < 2; ++i) of_row[i] = load_shared_float(first + 8 * i * sizeof(float));
#pragma unroll
      for (int w = 0; w < kWaves; ++w)
        of_block[w] = load_shared_float(at + (16 + w) * sizeof(float));
      this->advance(more, lane);
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

  // Sums the first `waves` x 128 columns of the tile over its steps. meanwhile(takes): called while
  // each step's first wave is in flight; `takes` as in main_loop.cuh.
  template <int waves, class F>
  static __device__ void sum(Params const& p, float (&sums)[C.tile_n / 2], Cursor& at,
                             Tile const& tile, Scales& scales, SharedStorage& smem, Self self,
                             F&& meanwhile) {
    int const count = Loop::steps(tile);
    uint32_t const full = kept(shared_address(smem.full));
    uint32_t const a =
        kept(descriptor<Major::K>(shared_address(smem.a[0]) + self.group * kBlockBytes));
    uint32_t const b = kept(descriptor<Major::K>(shared_address(smem.b[0])));
    clear_registers(sums);
    p.epilogue.template start<C.tile_n>(sums, tile, self.thread);
    int step = 0;
    do {
      Barrier::wait_at(full + at.stage * sizeof(Barrier), at.phase);
      Wave wave;
      forget_registers(wave);
      float of_row[2], of_block[kWaves];
#pragma unroll
      for (int w = 0; w < waves; ++w) {
        fence_registers(wave);
        multiply(wave, a + at.stage * (C.a_bytes() / 16),
                 b + at.stage * (C.b_bytes() / 16) + w * (2 * kBlockBytes / 16));
        if (w == 0) {
          meanwhile(step + 1 == count);
          scales.take(of_row, of_block, step + 2 < count, self);
        }
        wgmma_wait<0>();
        fence_registers(wave);
        if (w == waves - 1 && self.leads_warp()) Loop::release(smem.empty[at.stage]);
        promote(sums + 64 * w, wave, of_row[0] * of_block[w], of_row[1] * of_block[w]);
      }
      at.advance();
    } while (++step < count);
  }

  static __device__ auto& ahead_of(SharedStorage& smem, Self self) {
    return smem.ahead[4 * self.group + self.thread / 32];
  }

  // The epilogue of a ReadingEpilogue, two units of 64 columns (one block of scales) at a time.
  // Their stages are released once both are stored. Units' sums are always the first ones: the rest
  // shift down.
  static __device__ void finish(Params const& p, float (&sums)[C.tile_n / 2], Cursor& at,
                                Tile const& tile, auto& storage, SharedStorage& smem, Self self) {
    Epilogue const& e = p.epilogue;
    Tile const part = row_block(tile, self.group);
    ChunkShare const share{smem.exchange, self.group, tile.rows > 64};
    auto const& ahead = ahead_of(smem, self);
    int const units = e.units(part);
    typename Epilogue::State state;
    // As in consume(): what is derived from the thread is not kept until it is needed again.
    auto const thread = [&] { return int(kept(uint32_t(self.thread))); };
    // For `ahead`: for all copies but the next tile's scales.
    wait_for_copies<kGathers ? 0 : 2>();
    __syncwarp();
    e.begin(state, ahead, part, thread());
#pragma unroll(Epilogue::kCopies)
    for (int first = 0; first < C.tile_n / 64; first += 2) {
      typename Epilogue::Stages stages{};
      e.begin_block(state, part, first, thread());
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first + i < units) {
          smem.full[at.stage].wait(at.phase);
          stages.a[i] = shared_address(smem.a[at.stage] + self.group * kBlockBytes);
          stages.b[i] = shared_address(smem.b[at.stage] + self.group * kBlockBytes);
          e.read_unit(sums + 32 * i, stages.b[i], state, part, first + i, thread(), storage);
          at.advance();
        }
      }
      e.store_units(sums, state, stages, part, first, thread(), storage, share, ahead);
      wait_for_stores(self.thread);
      if (self.leads_warp()) {
        Loop::release(smem.empty[at.before(1)]);
        if (stages.b[1] != 0) Loop::release(smem.empty[at.before(2)]);
      }
      if (first + 2 >= units) break;
#pragma unroll
      for (int i = 0; i + 64 < C.tile_n / 2; ++i) sums[i] = sums[i + 64];
    }
    e.finish(state, part, thread());
  }

  static __device__ void consume(Params const& p, SharedStorage& smem, Self self) {
    float sums[C.tile_n / 2];
    auto& storage = smem.epilogue[self.group];
    Cursor at;
    QueueEnd tiles;
    Tile tile, following;
    // To save registers: a tile with expert -1 stands for the end, `inner` is the same for all
    // tiles, and `apart` is packed into `rows` until the tile is processed.
    auto const take = [&](Tile& to) {
      if (!smem.tiles.take(tiles, to)) to.expert = -1;
      to.rows |= int(to.apart) << 16;
    };
    auto const unpacked = [&](Tile to) {
      to.apart = to.rows >> 16 != 0;
      to.rows &= 0xffff;
      to.inner = p.work.inner;
      return to;
    };
    take(following);
    tile = unpacked(following);
    Scales scales(smem, self);
    scales.begin(p, tile, self);
    for (; tile.expert >= 0; tile = unpacked(following)) {
      Tile const part = row_block(tile, self.group);
      if (part.rows <= 0) {
        int units = 0;
        if constexpr (Base::kReads) units = p.epilogue.units(tile);
        Loop::pass(Loop::steps(tile) + units, at, smem, self);
        take(following);
        scales.begin(p, unpacked(following), self);
        continue;
      }
      auto const meanwhile = [&](bool takes) {
        if (takes) take(following);
      };
      if constexpr (Base::kReads) p.epilogue.fetch(ahead_of(smem, self), part, self.thread);
      // Only for these: in other products the larger code costs more time than this saves.
      if (Base::kReads && tile.col / 128 + 1 >= p.n_blocks) {
        sum<1>(p, sums, at, tile, scales, smem, self, meanwhile);
      } else {
        sum<kWaves>(p, sums, at, tile, scales, smem, self, meanwhile);
      }
      scales.find_row(p, following, self);  // overlaps with the stores
      if constexpr (!kGathers) scales.begin_found(p, unpacked(following), self);
      // Otherwise the compiler computes thread-dependent values before the sum, and spills.
      Self late = self;
      late.thread = int(kept(uint32_t(self.thread)));
      if constexpr (Base::kReads) {
        finish(p, sums, at, tile, storage, smem, late);
      } else {
        typename Epilogue::template Parcel<C.tile_n> parcel;
        parcel.begin(p.epilogue, sums, storage, part, late.thread);
      }
      if constexpr (kGathers) scales.begin_found(p, unpacked(following), self);
      // Makes the cursor uniform again for the compiler.
      at.stage = __shfl_sync(~0u, at.stage, 0);
      at.phase = __shfl_sync(~0u, at.phase, 0);
    }
  }

  static __device__ void run(Params const& p, SharedStorage& smem) {
    if (threadIdx.x == 0) smem.exchange.init();  // Base's fence and barrier follow
    Base::run(p, smem, [&](Self self) {
      consume(p, smem, self);
      if (self.leads_warp()) tma_store_wait<0>();  // shared memory must outlive the last store
    });
  }
};

}  // namespace guild::cuda
