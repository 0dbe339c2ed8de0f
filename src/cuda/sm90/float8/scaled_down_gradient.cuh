// The down gradient's epilogue with quantised results: from g = dO W2 and the pre-activations H of
// the same tile to
//
//   dH = d activation(s g, H) as codes and scales,  dS: the sum of g A, one part per tile of
//   columns
//
// and, where the weight gradients are products of 16-bit values, dH and A' = s A rounded. H comes
// through the ring of stages, 64 columns of the tile at a time; two of them are a block of scales.
#pragma once
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/float8/quantized_fragment.cuh"
#include "shared/gemm_config.h"

namespace guild::cuda {

template <class T, Known known>
struct ScaledDownGradientEpilogue {
  CUtensorMap h;        // (columns, halves, rows), boxes of 64 x 1 x 64
  int columns;          // I
  CodeOutput dh_codes;  // (R, W) in halves
  GateUpRows<T> dh;     // (R, W), ordered as h; absent where not wanted
  ByteRows a;           // A' (R, I); absent where not wanted
  float const* score;   // (R); null: 1
  float* parts;         // (R, part_count); null: no dS
  int part_count;
  ActivationOf<float> activation;
  KnownPairing<known> pairing;

  static constexpr int kCopies = 1;
  static constexpr int kBoxBytes = 2 * kBlockBytes;  // 64 columns, 128 rows: both consumers'

  using Storage = StoreBoxes;
  struct State {
    float scale[2], dot[2];  // of the rows r and r + 8 that a thread holds
  };

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }

  // How many units of 64 columns the tile has. Blocks that split a tile by columns count those of
  // the first block's, so that their rings of stages stay in step.
  __device__ int units(Tile const& tile) const {
    int const first = tile.apart ? tile.col - cluster_rank() * kScoreColumns : tile.col;
    return min((columns - first + 63) / 64, kScoreColumns / 64);
  }

  // H of 64 columns of the tile: a box of gate and one of up; two boxes of 32 pairs; or, without a
  // gate, one box.
  __device__ void load(Tile const& tile, int unit, char* to, Barrier& full) const {
    full.arrive_expect(boxes() * (tile.rows > 64 ? kBoxBytes : tile.rows > 0 ? kBlockBytes : 0));
    int const col = tile.col + 64 * unit;
#pragma unroll 1
    for (int row = 0; row < tile.rows; row += 64, to += kBlockBytes) {
      for (int i = 0; i < boxes(); ++i) {
        bool const halves = pairing == Pairing::halves;
        int const x = halves ? col : (pairing == Pairing::alternate ? 2 * col : col) + 64 * i;
        tma_load(h, to + i * kBoxBytes, Coordinate{x, halves ? i : 0, tile.row + row}, full);
      }
    }
  }

  __device__ void begin(State& rows, Tile const& tile, int thread) const {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      int const r = fragment_row(thread) + 8 * below;
      rows.scale[below] = score != nullptr && r < tile.rows ? score[tile.row + r] : 1.f;
      rows.dot[below] = 0;
    }
  }

  // Turns the 32 sums g of a unit into the gradients of gate, stores its A' and leaves the
  // gradients of up where H was, in float32: 64 registers more would spill.
  __device__ void read_unit(float* g, uint32_t stage, State& rows, Tile const& tile, int unit,
                            int thread, StoreBoxes const& boxes) const {
    int const col = tile.col + 64 * unit, left = columns - col;
    uint32_t const box = boxes.address(unit % 2);
    with_known_family<known>(activation, [&](auto family) {
      if (pairing == Pairing::none) {
        differentiate<family.value>(with_gate(activation, false), g, stage, box, rows, left,
                                    thread);
      } else {
        auto const act = with_constants<known>(with_gate(activation, true));
        differentiate<family.value>(act, g, stage, box, rows, left, thread);
      }
    });
    if (a.data != nullptr) a.store(box, tile, kBytes * col, kBytes * columns, thread);
  }

  // Stores the gradients of the two units from `unit` on. stage: where read_unit() has left those
  // of up; 0: there is no such unit, whose sums are zeros then, or NaN where the first unit's are.
  __device__ void store_units(float const* gate, uint32_t const (&stage)[2], Tile const& tile,
                              int unit, int thread, StoreBoxes const& boxes) const {
    int const col = tile.col + 64 * unit;
    if (col >= columns) return;
    bool const wanted = dh.rows.data != nullptr, alternates = pairing == Pairing::alternate;
    if (wanted && !alternates) dh.put_half(0, gate, boxes, tile, col, thread);
    if (wanted && alternates) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float up[32];
        load_up(up, stage[i], thread);
        dh.put_alternating(gate + 32 * i, up, boxes, tile, col + 64 * i, thread);
      }
    }
    put_codes(dh_codes, gate, boxes.address(0), tile, col, 0, thread);
    if (pairing == Pairing::none) return;
    float up[64];
    load_up(up, stage[0], thread);
    load_up(up + 32, stage[1], thread);
    if (wanted && !alternates) dh.put_half(1, up, boxes, tile, col, thread);
    put_codes(dh_codes, up, boxes.address(1), tile, col, 1, thread);
  }

  // Sums over the four threads that share a row, in a fixed order, and stores the tile's part.
  __device__ void finish(State const& rows, Tile const& tile, int thread) const {
    if (parts == nullptr || tile.col >= columns) return;
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
  static constexpr int kBytes = sizeof(T);

  __device__ int boxes() const { return pairing == Pairing::none ? 1 : 2; }

  // g becomes the gate's gradient; returns A'.
  template <Family family>
  static __device__ float at_element(ActivationOf<float> const& act, State& rows, int below,
                                     float& g, float& up_gradient, float gate, float up) {
    float const s = rows.scale[below];
    auto const d = activate_gradient<family>(act, gate, up, s * g);
    rows.dot[below] += g * d.a;
    g = d.dgate;
    up_gradient = d.dup;
    return s * d.a;
  }

  // H of 16 columns as a thread's g has it: a word holds two neighbours of a row.
  struct Hidden {
    uint32_t gate[4], up[4] = {0, 0, 0, 0};
  };

  // The 16 columns from 8 * block on.
  __device__ Hidden read_hidden(uint32_t stage, int block, int thread) const {
    Hidden to;
    if (pairing == Pairing::alternate) {
      read_alternating(to, stage, block, thread);
      return to;
    }
    uint32_t const at = matrices_address(stage, thread) ^ (16 * block);
    load_matrices(at, to.gate[0], to.gate[1], to.gate[2], to.gate[3]);
    if (pairing == Pairing::halves) {
      load_matrices(at + kBoxBytes, to.up[0], to.up[1], to.up[2], to.up[3]);
    }
    return to;
  }

  // Columns 2c and 2c + 1 are gate and up of column c: two neighbours of each are 8 bytes.
  static __device__ void read_alternating(Hidden& to, uint32_t stage, int block, int thread) {
    int const column = 2 * fragment_column(thread);
    uint32_t const start = chunk_address(stage, fragment_row(thread), column / 8) + column % 8 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const here = block + i / 2, below = i % 2;
      uint32_t const at = (start ^ (here % 4 * 32)) + here / 4 * kBoxBytes + below * 1024;
      uint32_t first, second;
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(at));
      to.gate[i] = __byte_perm(first, second, 0x5410);
      to.up[i] = __byte_perm(first, second, 0x7632);
    }
  }

  // A thread's 16 bytes, i of two, where H of the 16 columns from 8 * block on was.
  __device__ uint32_t own_bytes(uint32_t stage, int block, int i, int thread) const {
    uint32_t const at = matrices_address(stage, thread);
    if (pairing != Pairing::alternate) return (at ^ (16 * block)) + i * kBoxBytes;
    return (at ^ (16 * (2 * block % 8 + 2 * i))) + block / 4 * kBoxBytes;
  }

  // What read_unit() has left in a stage; zeros without one.
  __device__ void load_up(float* up, uint32_t stage, int thread) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float* const v = up + 4 * i;
      v[0] = v[1] = v[2] = v[3] = 0;
      if (stage == 0) continue;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(own_bytes(stage, i / 2 * 2, i % 2, thread)));
    }
  }

  // Where word group i of 8 of a thread lies in the rows of its warp in a unit's two boxes.
  static __device__ uint32_t own_words(uint32_t stage, int i, int thread) {
    return stage + i / 4 * kBoxBytes + thread / 32 * 2048 + i % 4 * 512 + thread % 32 * 16;
  }

  // The branch every 16 columns keeps the compiler from interleaving all columns.
  template <Family family>
  __device__ __forceinline__ void differentiate(ActivationOf<float> const& act, float* g,
                                                uint32_t stage, uint32_t box, State& rows, int left,
                                                int thread) const {
    uint32_t const to = matrices_address(box, thread);
#pragma unroll
    for (int block = 0; block < 8; block += 2) {
      float up[8] = {};
      if (8 * block < left) {
        Hidden const hidden = read_hidden(stage, block, thread);
        uint32_t a_word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float2 const x = unpack<T>(hidden.gate[i]), u = unpack<T>(hidden.up[i]);
          float* const v = g + 4 * block + 2 * i;
          asm volatile("" : "+f"(v[0]), "+f"(v[1]));
          float const low = at_element<family>(act, rows, i % 2, v[0], up[2 * i], x.x, u.x);
          float const high = at_element<family>(act, rows, i % 2, v[1], up[2 * i + 1], x.y, u.y);
          a_word[i] = pack<T>(low, high);
        }
        if (a.data != nullptr) {
          store_matrices(to ^ (16 * block), a_word[0], a_word[1], a_word[2], a_word[3]);
        }
      }
      if (act.gated) leave_up(up, stage, block, thread);
    }
  }

  __device__ void leave_up(float const (&up)[8], uint32_t stage, int block, int thread) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm volatile(
          "st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own_bytes(stage, block, i, thread)),
          "f"(up[4 * i]), "f"(up[4 * i + 1]), "f"(up[4 * i + 2]), "f"(up[4 * i + 3])
          : "memory");
    }
  }
};

}  // namespace guild::cuda
