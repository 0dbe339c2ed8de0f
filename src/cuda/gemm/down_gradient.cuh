// The down gradient's epilogue: from g = dO W2 and the pre-activations H of the same tile to
//
//   dH = d activation(s g, H),  A' = s A,  and over the tile's columns the partial sum <g, A> = dS
//
// H is fetched by TMA while the products run (begin) and replaced by dH where it lies, box by box.
// SonicMoE, arXiv:2512.14080, section 3.2.
#pragma once
#include "outputs.cuh"
#include "shared/tiles.h"

namespace guild::cuda {

template <class T>
struct DownGradientEpilogue {
  CUtensorMap h;       // as dh.map
  RowOutput<T> dh;     // columns = I in two halves, 2I interleaved, or I
  RowOutput<T> a;      // A', columns = I; absent where not wanted
  float const* score;  // (R); null: 1
  float* parts;        // (R, part_count); null: no dS
  int part_count;
  Activation activation;
  Pairing pairing;

  struct Storage {
    alignas(1024) char h[4][kBlockBytes];  // gate, gate, up, up; or 4 x 32 pairs; or 2 boxes
    StoreBoxes out;
    Barrier loaded;
  };
  struct State {
    Storage& storage;
    StoreRing ring;
    uint32_t phase = 0;
    __device__ State(Storage& s) : storage(s), ring(s.out) {}
  };
  static __device__ void init(Storage& s) { s.loaded.init(1); }

  // A pair of rows (r and r + 8) that a thread holds.
  struct RowPair {
    float scale[2];
    float dot[2] = {0, 0};
  };

  __device__ void begin(State& state, Tile const& tile, int thread) const {
    if (thread != 0) return;
    tma_store_wait<0>();  // dH of the previous tile has left the boxes
    bool const gated = pairing != Pairing::none;
    state.storage.loaded.arrive_expect((gated ? 4 : 2) * kBlockBytes);
    for (int i = 0; i < (gated ? 4 : 2); ++i) {
      tma_load(h, state.storage.h[i], place(tile, i), state.storage.loaded);
    }
  }

  template <int n>
  __device__ void store(float (&acc)[n / 2], State& state, Tile const& tile, int thread) const {
    static_assert(n == 128, "the boxes of Storage hold 128 columns");
    RowPair rows;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      int const r = fragment_row(thread) + 8 * below;
      rows.scale[below] = score != nullptr && r < tile.rows ? score[tile.row + r] : 1.f;
    }
    state.storage.loaded.wait(state.phase);
    state.phase ^= 1;
    with_family(activation, [&](auto family) {
      if (pairing == Pairing::alternate) {
        differentiate_alternate<family.value>(acc, rows, state.storage, thread);
      } else {
        differentiate_halves<family.value>(acc, rows, state.storage, thread);
      }
    });
    int const boxes = pairing == Pairing::none ? 2 : 4;
    for (int i = 0; i < boxes; ++i) {
      Coordinate const at = place(tile, i);
      if (at.x < dh.columns) {
        store_box(dh, state.storage.h[i], tile.row, at.x, at.y, tile.rows, thread);
      }
    }
    if (parts != nullptr) store_dot(rows, tile, thread);
    if (a.data != nullptr) {
      // Since a box of A' was last stored, the other one was and two of dH at least.
      store_rows<T, n, 3>(a, state.ring, acc, tile.row, tile.col, 0, tile.rows, thread);
    }
    if (tile.rows < 64) warpgroup_barrier();  // boxes are read by all; begin() overwrites them
  }

 private:
  // Where box i of the tile lies in H: (column, half, row).
  __device__ Coordinate place(Tile const& tile, int i) const {
    if (pairing == Pairing::alternate) return {2 * tile.col + 64 * i, 0, tile.row};
    return {tile.col + i % 2 * 64, i / 2, tile.row};
  }

  template <Family family>
  __device__ void differentiate(RowPair& rows, int below, float& g, float& gate, float& up) const {
    float const s = rows.scale[below];
    auto const d = activate_gradient<family>(activation, gate, up, s * g);
    rows.dot[below] += g * d.a;
    g = s * d.a;
    gate = d.dgate;
    up = d.dup;
  }

  // Gate in boxes 0 and 1, up in 2 and 3 (left alone without a gate).
  template <Family family>
  __device__ void differentiate_halves(float (&acc)[64], RowPair& rows, Storage& s,
                                       int thread) const {
    int const row = thread / 32 * 16 + thread % 16;
    bool const gated = pairing != Pairing::none;
#pragma unroll
    for (int block = 0; block < 16; block += 2) {
      int const chunk = block % 8 + thread % 32 / 16;
      uint32_t const gate_at = chunk_address(shared_address(s.h[block / 8]), row, chunk);
      uint32_t const up_at = chunk_address(shared_address(s.h[2 + block / 8]), row, chunk);
      uint32_t gate[4], up[4] = {0, 0, 0, 0};
      load_matrices(gate_at, gate[0], gate[1], gate[2], gate[3]);
      if (gated) load_matrices(up_at, up[0], up[1], up[2], up[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 x = unpack<T>(gate[i]), u = unpack<T>(up[i]);
        float* const g = acc + 4 * block + 2 * i;
        differentiate<family>(rows, i % 2, g[0], x.x, u.x);
        differentiate<family>(rows, i % 2, g[1], x.y, u.y);
        gate[i] = pack<T>(x.x, x.y);
        up[i] = pack<T>(u.x, u.y);
      }
      store_matrices(gate_at, gate[0], gate[1], gate[2], gate[3]);
      if (gated) store_matrices(up_at, up[0], up[1], up[2], up[3]);
    }
  }

  // Columns 2c and 2c + 1 of H are gate and up of column c: a thread's two neighbours of g need 8
  // bytes in a row.
  template <Family family>
  __device__ void differentiate_alternate(float (&acc)[64], RowPair& rows, Storage& s,
                                          int thread) const {
#pragma unroll
    for (int block = 0; block < 16; ++block) {
      uint32_t const box = shared_address(s.h[block / 4]);
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        int const column = block % 4 * 16 + 2 * fragment_column(thread);
        uint32_t const at =
            chunk_address(box, fragment_row(thread) + 8 * below, column / 8) + column % 8 * 2;
        uint32_t first, second;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(at));
        float2 x = unpack<T>(first), y = unpack<T>(second);  // (gate, up) of two columns
        float* const g = acc + 4 * block + 2 * below;
        differentiate<family>(rows, below, g[0], x.x, x.y);
        differentiate<family>(rows, below, g[1], y.x, y.y);
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(pack<T>(x.x, x.y)),
                     "r"(pack<T>(y.x, y.y))
                     : "memory");
      }
    }
  }

  // Sums over the four threads that share a row, in a fixed order, and stores the tile's part.
  __device__ void store_dot(RowPair const& rows, Tile const& tile, int thread) const {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      float dot = rows.dot[below];
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      int const r = fragment_row(thread) + 8 * below;
      if (thread % 4 == 0 && r < tile.rows) {
        parts[int64_t(tile.row + r) * part_count + tile.col / 128] = dot;
      }
    }
  }
};

}  // namespace guild::cuda
