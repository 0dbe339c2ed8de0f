// The epilogue of a tall tile: columns of D, or of A = activation(H), transposed through shared
// memory and stored by TMA, 64 rows at a time.
//
// A tile has one or two parts of 128 rows of weights, of which each of the two warpgroups has 64.
// Gate and up alternate in groups of eight rows, so that a thread holds both for its columns.
#pragma once
#include "cuda/arch/l2.cuh"
#include "cuda/sm90/decode/tall_tiles.h"
#include "cuda/sm90/outputs.cuh"

namespace guild::cuda::sm90 {

// A thread's sums: for each part of weights a fragment whose rows are weight rows and whose
// columns, up to 152, are rows of X.
inline constexpr int kPartSums = kTallRows / 2;
using TallSums = float[2][kPartSums];

// plain: SwiGLU of halves, without biases.
template <class T, bool activates, bool plain>
struct TallResults {
  static constexpr auto kKnown = plain ? StaticActivation::swiglu : StaticActivation::any;
  RowOutput<T> out;  // A, or D
  bool short_lived;  // products.h
  Bias<T> bias;      // (E, columns of H), ordered as H
  StaticPairing<kKnown> pairing;
  ActivationOf<float> activation;

  struct Storage {
    alignas(1024) char box[2][kBlockBytes];
  };

  __device__ bool paired() const { return activates && pairing != Pairing::none; }
  // Columns of A or D from one part of a tile's weights.
  __device__ int part_columns() const { return paired() ? 64 : 128; }

  // Fills the accumulators with the bias; false if there is none.
  __device__ bool start(TallSums& acc, Tile const& tile, int group, int thread) const {
    if (bias.data == nullptr) return false;
    T const* const row = bias.data + tile.expert * bias.stride;
    int const q = fragment_row(thread);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        int const within = paired() ? 32 * group + q / 16 * 8 + q % 16 : 64 * group + q + 8 * below;
        int const col = tile.col + part * part_columns() + within;
        int const at = !paired()                       ? col
                       : pairing == Pairing::alternate ? 2 * col + below
                                                       : below * out.columns + col;
        float const value = col < out.columns ? float(row[at]) : 0.f;
#pragma unroll
        for (int i = 0; i < kPartSums; ++i) {
          if (i % 4 / 2 == below) acc[part][i] = value;
        }
      }
    }
    return true;
  }

  // Stores 64 rows of a part at a time, from a copy of their sums, so that the code is emitted
  // once. turn: which box the next pairs use.
  __device__ void store(TallSums const& acc, Tile const& tile, bool broad, Storage& storage,
                        int& turn, int group, int thread) const {
    float sum[32];
    clear_registers(sum);
#pragma unroll 1
    for (int i = 0; i < (broad ? 2 * kChunks : 1); ++i) {
      Tile rows = row_block(tile, i % kChunks);
      rows.col += i / kChunks * part_columns();
      if (rows.rows <= 0 || rows.col >= out.columns) continue;
      take(sum, acc, i, std::make_index_sequence<2 * kChunks>());
      if (paired()) {
        store_pairs(sum, rows, storage.box[turn], group, thread);
        turn ^= 1;
      } else {
        store_plain(sum, rows, storage.box[group], group, thread);
      }
    }
  }

 private:
  __device__ uint64_t policy() const { return short_lived ? evict_last() : evict_normal(); }

  static constexpr int kChunks = (kTallRows + 63) / 64;  // of 64 rows of a part, or what is left

  // Copies the sums of chunk i of both parts' chunks.
  template <size_t... chunk>
  static __device__ void take(float (&sum)[32], TallSums const& acc, int i,
                              std::index_sequence<chunk...>) {
    ((i == int(chunk) && (take_chunk<int(chunk)>(sum, acc), true)) || ...);
  }
  template <int chunk>
  static __device__ void take_chunk(float (&sum)[32], TallSums const& acc) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      constexpr int first = chunk % kChunks * 32;
      if (first + j < kPartSums) sum[j] = acc[chunk / kChunks][first + j];
    }
  }

  // 64 columns of A from both warpgroups in one box.
  __device__ void store_pairs(float const (&sum)[32], Tile const& rows, char* box, int group,
                              int thread) const {
    uint32_t word[8];
    auto const act = with_gate(with_constants<kKnown>(activation), true);
    with_static_family<kKnown>(activation, [&](auto family) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i % 2 == 0 && 8 * i >= rows.rows) break;
        word[i] = pack<T>(activate<family.value>(act, sum[4 * i], sum[4 * i + 2]),
                          activate<family.value>(act, sum[4 * i + 1], sum[4 * i + 3]));
      }
    });
    bool const stores = group == 0 && thread == 0;
    if (stores) tma_store_wait<1>();  // this box was stored before the other
    named_barrier(1, 256);
    int const chunk = 4 * group + thread / 32;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      int const row = 8 * i + thread % 32;
      store_matrices_transposed(chunk_address(shared_address(box), row, chunk), word[i],
                                word[i + 1], word[i + 2], word[i + 3]);
    }
    fence_async_proxy();
    named_barrier(1, 256);
    if (!stores) return;
    out.store(box, rows, rows.col, 0, policy());
    tma_store_commit();
  }

  // 64 columns of each warpgroup in a box of its own.
  __device__ void store_plain(float (&sum)[32], Tile const& rows, char* box, int group,
                              int thread) const {
    if constexpr (activates) {
      with_family(activation, [&, act = with_gate(activation, false)](auto family) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if (i % 8 == 0 && 2 * i >= rows.rows) break;
          sum[i] = activate<family.value>(act, sum[i], 0.f);
        }
      });
    }
    BoxWords word;
    pack_box<T>(word, sum);
    if (thread == 0) tma_store_wait<0>();
    named_barrier(2 + group, 128);
    words_to_box_transposed(shared_address(box), word, thread);
    fence_async_proxy();
    named_barrier(2 + group, 128);
    int const col = rows.col + 64 * group;
    if (thread != 0 || col >= out.columns) return;
    out.store(box, rows, col, 0, policy());
    tma_store_commit();
  }
};

}  // namespace guild::cuda::sm90
