// The down gradient's epilogue. From g = dO W2 and the pre-activations H of the same tile:
//
//   dH = d activation(s g, H),  A' = s A,  dS: row sums of g A, one part per column tile
//
// For bias gradients it also computes column sums over 64 rows each, by wgmma (column_sums.cuh).
// Those of dH read the stage from which dH is then stored. Those of s dO read the operand A, step
// by step. All tiles in a row of tiles have the same rows of dO, so only those in the first column
// compute them. A second kernel adds up the sums over 64 rows (rows/bias_sums.cu).
//
// H arrives through the ring of stages, 64 columns of the tile at a time, and dH overwrites it
// there. SonicMoE, arXiv:2512.14080, section 3.2.
#pragma once
#include "cuda/arch/cluster.cuh"
#include "cuda/sm90/column_sums.cuh"
#include "cuda/sm90/outputs.cuh"
#include "shared/bias_sums.h"
#include "shared/gemm_config.h"
#include "shared/tiles.h"

namespace guild::cuda {

template <class T, StaticActivation known>
struct DownGradientEpilogue {
  CUtensorMap h;          // (columns, halves, h_rows), boxes of 64 x 1 x 64
  CUtensorMap h_again;    // the same of all rows, read where *needed > h_rows
  int32_t const* needed;  // null: never
  int h_rows;
  RowOutput<T> dh;     // columns = I in two halves, 2I interleaved, or I
  RowOutput<T> a;      // A', columns = I; absent where not wanted
  float const* score;  // (R); null: 1
  float* parts;        // (R, part_count); null: no dS
  int part_count;
  float* dh_sums;    // (most_bias_chunks(R, E), W); null: not wanted
  float* dout_sums;  // (most_bias_chunks(R, E), hidden): of s dO; null: not wanted
  int hidden;
  ActivationOf<float> activation;
  StaticPairing<known> pairing;

  // Unroll factor of the loop over units. Only SwiGLU's code fits the instruction cache when
  // unrolled.
  static constexpr int kCopies = known == StaticActivation::swiglu ? kScoreColumns / 64 : 1;
  static constexpr int kBoxBytes = 2 * kBlockBytes;  // 64 columns, 128 rows: both consumers'

  struct Storage {
    NarrowOperand<T> ones;
    ScoreOperand<T> scores;
  };
  struct State {
    float scale[2], dot[2];  // of the rows r and r + 8 that a thread holds
  };

  // Units of 64 columns in the tile. Blocks that split a tile by columns all return the first
  // block's number, so that their rings stay in step.
  __device__ int units(Tile const& tile) const {
    int const first = tile.apart ? tile.col - cluster_rank() * kScoreColumns : tile.col;
    return min((columns() - first + 63) / 64, kScoreColumns / 64);
  }

  // H of 64 columns of the tile: a box of gate and one of up; two boxes of 32 pairs; or, without a
  // gate, one box.
  __device__ void load(Tile const& tile, int unit, char* to, Barrier& full) const {
    full.arrive_expect(boxes() * (tile.rows > 64 ? kBoxBytes : tile.rows > 0 ? kBlockBytes : 0));
    CUtensorMap const& from = needed != nullptr && *needed > h_rows ? h_again : h;
#pragma unroll 1
    for (int row = 0; row < tile.rows; row += 64, to += kBlockBytes) {
      for (int i = 0; i < boxes(); ++i) {
        Coordinate const at = place(tile, unit, i);
        tma_load(from, to + i * kBoxBytes, {at.x, at.y, at.z + row}, full);
      }
    }
  }

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }

  __device__ void begin(State& rows, Tile const& tile, int thread) const {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      int const r = fragment_row(thread) + 8 * below;
      rows.scale[below] = score != nullptr && r < tile.rows ? score[tile.row + r] : 1.f;
      rows.dot[below] = 0;
    }
  }

  __device__ void prepare(Storage& storage, int thread) const {
    if (dh_sums == nullptr && dout_sums == nullptr) return;
    storage.ones.fill(T(1.f), thread);
    storage.scores.clear(thread);
    fence_async_proxy();
    warpgroup_barrier();
  }

  // Whether these rows of a tile sum s dO: those of the first column of tiles.
  __device__ bool wants_side_sums(Tile const& part) const {
    return dout_sums != nullptr && part.col == 0 && part.rows > 0;
  }
  // The scores may be overwritten: all threads have passed a barrier of store_unit() since their
  // last use.
  __device__ ScoreSums<T> side_sums(Storage& storage, Tile const& part, int rest,
                                    int thread) const {
    storage.scores.put(score, part, thread);
    int const first = fragment_row(thread);
    float* const to = dout_sums + int64_t(bias_chunk_of(part.row, part.expert)) * hidden + first;
    return {storage.scores, to, hidden - first, rest, thread};
  }

  // Writes A' to `box` and dH over H in `stage`; `storer` issues all stores as one group.
  __device__ void store_unit(float* g, char* box, char* stage, State& rows, Tile const& tile,
                             int unit, int thread, int storer, Storage& storage) const {
    differentiate(g, stage, rows, columns() - tile.col - 64 * unit, thread);
    if (a.present) fragment_to_box<T>(shared_address(box), g, thread);
    if (dh_sums != nullptr) clear_rest(shared_address(stage), tile.rows, thread);
    fence_async_proxy();
    warpgroup_barrier();
    if (dh_sums != nullptr) add_rows(shared_address(stage), tile, unit, thread, storage);
    if (thread != storer) return;
    for (int i = 0; i < boxes(); ++i) {
      Coordinate const at = place(tile, unit, i);
      if (at.x < dh.columns) dh.store(stage + i * kBoxBytes, tile, at.x, at.y);
    }
    int const col = tile.col + 64 * unit;
    if (a.present && col < a.columns) a.store(box, tile, col, 0);
    tma_store_commit();
  }

  // Sums over the four threads that share a row, in a fixed order, and stores the tile's part.
  __device__ void finish(State const& rows, Tile const& tile, int thread) const {
    if (parts == nullptr) return;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      float dot = rows.dot[below];
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      int const r = fragment_row(thread) + 8 * below;
      if (thread % 4 == 0 && r < tile.rows) {
        parts[int64_t(tile.row + r) * part_count + tile.col / kScoreColumns] = dot;
      }
    }
  }

 private:
  // Writes zeros to the rows of dH that are not the tile's, since H may hold anything there. A warp
  // clears rows that it has written itself.
  __device__ void clear_rest(uint32_t stage, int valid, int thread) const {
    int const begin = thread / 32 * 16;
    __syncwarp();
#pragma unroll 1
    for (int row = max(valid, begin) + thread % 32 / 8; row < begin + 16; row += 4) {
      uint32_t const at = stage + row * 128 + thread % 8 * 16;
      clear_words(at);
      if (boxes() > 1) clear_words(at + kBoxBytes);
    }
  }

  // Sums dH's columns over the tile's rows and stores the sums.
  __device__ void add_rows(uint32_t stage, Tile const& tile, int unit, int thread,
                           Storage const& storage) const {
    int const width = dh.columns * (pairing == Pairing::halves ? 2 : 1);
    int64_t const chunk = bias_chunk_of(tile.row, tile.expert);
#pragma unroll 1
    for (int i = 0; i < boxes(); ++i) {
      float sum[4];
      start_sums(sum, stage + i * kBoxBytes, storage.ones);
      wgmma_wait<0>();
      fence_registers(sum);
      Coordinate const at = place(tile, unit, i);
      int const column = at.x + fragment_row(thread);
      if (thread % 4 == 0) {
        store_sums(dh_sums + chunk * width + at.y * dh.columns + column, dh.columns - column,
                   sum[0], sum[2]);
      }
    }
  }

  __device__ int columns() const { return dh.columns >> int(pairing == Pairing::alternate); }
  __device__ int boxes() const { return pairing == Pairing::none ? 1 : 2; }

  // Where box i of a unit lies in H: (column, half, row).
  __device__ Coordinate place(Tile const& tile, int unit, int i) const {
    int const col = tile.col + 64 * unit;
    if (pairing == Pairing::halves) return {col, i, tile.row};
    return {(pairing == Pairing::alternate ? 2 * col : col) + 64 * i, 0, tile.row};
  }

  // Replaces 64 columns of g by A', and H in the boxes by dH; `left` columns exist. Without the
  // early exits every 8 or 16 columns, the compiler interleaves all columns and spills.
  __device__ void differentiate(float* g, char* boxes, State& rows, int left, int thread) const {
    with_static_family<known>(activation, [&](auto family) {
      if (pairing == Pairing::alternate) {
        pairs<family.value>(with_gate(activation, true), g, boxes, rows, left, thread);
      } else if (pairing == Pairing::halves) {
        auto const act = with_constants<known>(with_gate(activation, true));
        halves<family.value>(act, g, boxes, rows, left, thread);
      } else {
        halves<family.value>(with_gate(activation, false), g, boxes, rows, left, thread);
      }
    });
  }

  template <Family family>
  static __device__ void at_element(ActivationOf<float> const& act, State& rows, int below,
                                    float& g, float& gate, float& up) {
    float const s = rows.scale[below];
    auto const d = activate_gradient<family>(act, gate, up, s * g);
    rows.dot[below] += g * d.a;
    g = s * d.a;
    gate = d.dgate;
    up = d.dup;
  }

  // H as gate in the first box, up in the second (none without a gate).
  template <Family family>
  static __device__ __forceinline__ void halves(ActivationOf<float> const& act, float* g,
                                                char* boxes, State& rows, int left, int thread) {
    uint32_t const first = matrices_address(shared_address(boxes), thread);
#pragma unroll
    for (int block = 0; block < 8; block += 2) {
      if (8 * block >= left) break;
      uint32_t const gate_at = first ^ (16 * block), up_at = gate_at + kBoxBytes;
      uint32_t gate[4], up[4] = {0, 0, 0, 0};
      load_matrices(gate_at, gate[0], gate[1], gate[2], gate[3]);
      if (act.gated) load_matrices(up_at, up[0], up[1], up[2], up[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 x = unpack<T>(gate[i]), u = unpack<T>(up[i]);
        float* const v = g + 4 * block + 2 * i;
        at_element<family>(act, rows, i % 2, v[0], x.x, u.x);
        at_element<family>(act, rows, i % 2, v[1], x.y, u.y);
        gate[i] = pack<T>(x.x, x.y);
        up[i] = pack<T>(u.x, u.y);
      }
      store_matrices(gate_at, gate[0], gate[1], gate[2], gate[3]);
      if (act.gated) store_matrices(up_at, up[0], up[1], up[2], up[3]);
    }
  }

  // H as alternating columns: 2c and 2c + 1 are gate and up of column c. A thread's two
  // neighbouring values of g need 8 consecutive bytes.
  template <Family family>
  static __device__ __forceinline__ void pairs(ActivationOf<float> const& act, float* g,
                                               char* boxes, State& rows, int left, int thread) {
    int const column = 2 * fragment_column(thread);
    uint32_t const start =
        chunk_address(shared_address(boxes), fragment_row(thread), column / 8) + column % 8 * 2;
#pragma unroll
    for (int block = 0; block < 8; ++block) {
      if (8 * block >= left) break;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        uint32_t const at = (start ^ (block % 4 * 32)) + block / 4 * kBoxBytes + below * 1024;
        uint32_t first, second;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(at));
        float2 x = unpack<T>(first), y = unpack<T>(second);  // (gate, up) of two columns
        float* const v = g + 4 * block + 2 * below;
        at_element<family>(act, rows, below, v[0], x.x, x.y);
        at_element<family>(act, rows, below, v[1], y.x, y.y);
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(pack<T>(x.x, x.y)),
                     "r"(pack<T>(y.x, y.y))
                     : "memory");
      }
    }
  }
};

}  // namespace guild::cuda
