// The down gradient's epilogue with quantised results: from g = dO W2 and the pre-activations H of
// the same tile to
//
//   dH = d activation(s g, H) as codes and scales,  dS: the sum of g A, one part per tile of
//   columns
//
// and the operands of the weight gradients: dH and A' = s A rounded, or chunks of both. H comes
// through the ring of stages, in 16 bits or as codes, in units of 64 columns of the tile; two units
// are the columns of one scale.
#pragma once
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/float8/hidden_units.cuh"
#include "cuda/sm90/float8/quantized_chunks.cuh"
#include "shared/gemm_config.h"

namespace guild::cuda {

template <class T, Known known, bool of_codes>
struct ScaledDownGradientEpilogue {
  using Hidden = HiddenUnits<T, known, of_codes>;

  Hidden hidden;
  int columns;          // I
  CodeOutput dh_codes;  // (R, W) in halves
  GateUpRows<T> dh;     // (R, W), ordered as 16-bit h; absent where not wanted
  WarpRows a;           // A' (R, I); absent where not wanted
  ChunkOutput dh_chunks, a_chunks;
  Groups groups;       // whose rows the chunks are of
  float const* score;  // (R); null: 1
  float* parts;        // (R, part_count); null: no dS
  int part_count;
  ActivationOf<float> activation;

  static constexpr int kCopies = 1;

  using Storage = StoreBoxes;
  struct State {
    float scale[2], dot[2];  // of the rows r and r + 8 that a thread holds
    float h_scale[2][2];     // of gate and up of these rows, in a block of codes of H
    // Largest magnitudes of the thread's share of a block, of these rows.
    float gate[2], up[2], a[2];
  };
  // Where the stages of a block's two units lie: the consumer's parts of the A operands, which are
  // unused, and of the B operands, which hold H. b[1]: 0 where the block has one unit.
  struct Stages {
    uint32_t a[2], b[2];
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

  __device__ void load(Tile const& tile, int unit, char* to, Barrier& full) const {
    hidden.load(tile, unit, to, full);
  }

  __device__ void begin(State& rows, Tile const& tile, int thread) const {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      int const r = fragment_row(thread) + 8 * below;
      rows.scale[below] = score != nullptr && r < tile.rows ? score[tile.row + r] : 1.f;
      rows.dot[below] = 0;
    }
  }

  // Before the first of a block's units.
  __device__ void begin_block(State& rows, Tile const& tile, int unit, int thread) const {
    hidden.load_scales(rows.h_scale, tile, tile.col + 64 * unit, thread);
#pragma unroll
    for (int below = 0; below < 2; ++below) rows.gate[below] = rows.up[below] = rows.a[below] = 0;
  }

  // Turns the 32 sums g of a unit into the gradients of gate, leaves its A' in a box of T and the
  // gradients of up where H was, in float32: 64 registers more would spill.
  __device__ void read_unit(float* g, uint32_t stage, State& rows, Tile const& tile, int unit,
                            int thread, StoreBoxes const& boxes) const {
    int const col = tile.col + 64 * unit, left = columns - col;
    uint32_t const box = boxes.address(unit % 2);
    with_known_family<known>(activation, [&](auto family) {
      if (hidden.pairing == Pairing::none) {
        differentiate<family.value>(with_gate(activation, false), g, stage, box, rows, left,
                                    thread);
      } else {
        auto const act = with_constants<known>(with_gate(activation, true));
        differentiate<family.value>(act, g, stage, box, rows, left, thread);
      }
    });
    if (a.present && left > 0) a.store(box, tile, col, 0, thread);
  }

  // Stores the gradients of the two units from `unit` on, and A' as a chunk. Where there is one
  // unit only, the sums of the second are zeros, or NaN where the first one's are.
  __device__ void store_units(float const* gate, State const& rows, Stages const& stages,
                              Tile const& tile, int unit, int thread, StoreBoxes const& boxes,
                              ChunkShare const& share) const {
    int const col = tile.col + 64 * unit;
    if (col >= columns) return;
    bool const gated = hidden.pairing != Pairing::none, two = stages.b[1] != 0;
    if (chunks()) {
      share.tell({magnitude(rows.gate, tile, thread), magnitude(rows.up, tile, thread),
                  magnitude_of_rounded(rows.a, tile, thread)},
                 thread);
    }
    QuantizedRows of_gate, of_up;
    float gate_to_code[2], up_to_code[2];
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      of_gate.largest[below] = rows.gate[below];
      of_up.largest[below] = rows.up[below];
      largest_of_quad(of_gate.largest[below]);
      largest_of_quad(of_up.largest[below]);
    }
    put_scales(of_gate, gate_to_code, dh_codes, tile, col, 0, thread);
    if (gated) put_scales(of_up, up_to_code, dh_codes, tile, col, 1, thread);
    store_pairs(gate, stages, tile, col, thread, boxes);
    store_half(0, gate, {stages.a[0], stages.a[1]}, tile, col, thread);
    encode(of_gate.codes, dh_codes, gate, gate_to_code);
    // Once the gradients of up are read, there is room where they were.
    uint32_t const box[2] = {stages.b[0] + Hidden::kBoxBytes,
                             two ? stages.b[1] + Hidden::kBoxBytes : boxes.address(1)};
    if (gated) {
      float up[64];
      hidden.load_up(up, stages.b[0], thread);
      hidden.load_up(up + 32, stages.b[1], thread);
      __syncwarp();
      store_half(1, up, {stages.b[0], stages.b[1]}, tile, col, thread);
      encode(of_up.codes, dh_codes, up, up_to_code);
      codes_to_box(of_up.codes, box[1], thread);
    }
    codes_to_box(of_gate.codes, box[0], thread);
    __syncwarp();
    dh_codes.codes.store_codes(box[0], tile, col, columns, thread);
    if (gated) dh_codes.codes.store_codes(box[1], tile, columns + col, 2 * columns, thread);
    if (chunks()) store_chunks(of_gate, of_up, stages, tile, col, thread, boxes, share);
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
  __device__ bool chunks() const { return dh_chunks.codes != nullptr || a_chunks.codes != nullptr; }

  // ---- storing a block

  // 16-bit dH of which gate and up alternate.
  __device__ void store_pairs(float const* gate, Stages const& stages, Tile const& tile, int col,
                              int thread, StoreBoxes const& boxes) const {
    if (dh.pairs.data == nullptr) return;
    uint32_t const box[2] = {stages.a[0], stages.b[1] != 0 ? stages.a[1] : boxes.address(1)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float up[32];
      hidden.load_up(up, stages.b[i], thread);
      dh.put_alternating(gate + 32 * i, up, box, tile, col + 64 * i, thread);
    }
  }
  // One half of any other.
  __device__ void store_half(int half, float const* value, uint32_t const (&box)[2],
                             Tile const& tile, int col, int thread) const {
    if (dh.halves.present) dh.put_half(half, value, box, tile, col, thread);
  }

  // The larger magnitude of a thread's two rows, if the tile has them.
  static __device__ uint32_t magnitude(float const (&of)[2], Tile const& tile, int thread) {
    int const left = tile.rows - fragment_row(thread);
    uint32_t const upper = left > 0 ? __float_as_uint(of[0]) : 0;
    return max(upper, left > 8 ? __float_as_uint(of[1]) : 0);
  }
  // The same of values that are stored as T: the largest is the largest one, rounded.
  static __device__ uint32_t magnitude_of_rounded(float const (&of)[2], Tile const& tile,
                                                  int thread) {
    float2 const rounded = unpack<T>(pack<T>(of[0], of[1]));
    return magnitude({rounded.x, rounded.y}, tile, thread);
  }
  // 16 columns of A' in T, two neighbours of rows r and r + 8 a word.
  static __device__ void load_a(uint32_t (&word)[4], int i, int thread, StoreBoxes const& boxes) {
    load_matrices(matrices_address(boxes.address(i / 4), thread) ^ (i % 4 * 32), word[0], word[1],
                  word[2], word[3]);
  }

  __device__ int slot_of(int end_before, Tile const& tile) const {
    int const begin = min(max(end_before, 0), groups.total);
    return begin / int(kScaleBlock) + tile.expert + (tile.row - begin) / int(kScaleBlock);
  }

  // Turned boxes of gate and up lie in unused parts of the stages, that of A' where all of the
  // consumer's warps have read the gradients of up.
  __device__ void store_chunks(QuantizedRows& of_gate, QuantizedRows& of_up, Stages const& stages,
                               Tile const& tile, int col, int thread, StoreBoxes const& boxes,
                               ChunkShare const& share) const {
    bool const two = stages.b[1] != 0, gated = hidden.pairing != Pairing::none;
    if (dh.present()) {  // its stores use the same boxes
      wait_for_stores(thread);
      warpgroup_barrier();
    }
    // One unit's boxes are half as large.
    uint32_t const box[2] = {stages.a[0], two ? stages.a[1] : stages.a[0] + kBlockBytes / 2};
    int const end_before = load_now(groups.ends + tile.expert - 1);
    Magnitudes const most = share.heard(thread);
    int const slot = slot_of(end_before, tile);
    bool const writes = share.group == 0 && thread == 0;
    if (dh_chunks.codes != nullptr) {
      turn_rows(of_gate, most.gate, 0, slot, box[0], tile, col, thread, writes);
      if (gated) turn_rows(of_up, most.up, 1, slot, box[1], tile, col, thread, writes);
      __syncwarp();
      order_rows(box[0], columns - col, thread);
      if (gated) order_rows(box[1], columns - col, thread);
      fence_async_proxy();
    }
    warpgroup_barrier();
    if (dh_chunks.codes != nullptr) {
      store_turned(dh_chunks, box[0], slot, 0, col, share, thread);
      if (gated) store_turned(dh_chunks, box[1], slot, 1, col, share, thread);
    }
    if (a_chunks.codes != nullptr) {
      turn_a(most.a, slot, stages.b[0], two, tile, col, thread, boxes, writes);
      __syncwarp();
      order_rows(stages.b[0], columns - col, thread);
      fence_async_proxy();
      warpgroup_barrier();
      store_turned(a_chunks, stages.b[0], slot, 0, col, share, thread);
    }
    if (thread == 0) tma_store_commit();
  }

  // Turns codes by row, changed to the block's scale from the rows' scales.
  __device__ void turn_rows(QuantizedRows& of, uint32_t most, int half, int slot, uint32_t box,
                            Tile const& tile, int col, int thread, bool writes) const {
    BlockScale const scale =
        block_scale(__uint_as_float(most), dh_codes.format, ScaleKind::power_of_two);
    float const factor[2] = {of.to_value[0] * scale.to_code, of.to_value[1] * scale.to_code};
    if (dh_codes.format == Float8::e4m3) {
      scale_codes<Float8::e4m3>(of.codes, factor);
    } else {
      scale_codes<Float8::e5m2>(of.codes, factor);
    }
    clear_absent(of.codes, tile, thread);
    turn_codes(box, of.codes, columns - col, thread);
    if (writes) dh_chunks.put_scale(slot, half, col, scale.to_value);
  }

  // A' of one or two units, which read_unit() has left in the boxes.
  __device__ void turn_a(uint32_t most, int slot, uint32_t to, bool two, Tile const& tile, int col,
                         int thread, StoreBoxes const& boxes, bool writes) const {
    BlockScale const scale =
        block_scale(__uint_as_float(most), Float8::e4m3, ScaleKind::power_of_two);
    CodeWords codes;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      codes.word[0][i] = codes.word[1][i] = 0;
      if (i >= 4 && !two) continue;
      uint32_t word[4];
      load_a(word, i, thread, boxes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 const v = unpack<T>(word[j]);
        uint32_t const pair = encode_pair<Float8::e4m3>(v.x * scale.to_code, v.y * scale.to_code);
        codes.word[j % 2][i] |= pair << (j / 2 * 16);
      }
    }
    __syncwarp();
    clear_absent(codes, tile, thread);
    turn_codes(to, codes, columns - col, thread);
    if (writes) a_chunks.put_scale(slot, 0, col, scale.to_value);
  }

  // ---- reading a unit

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

  // The branch every 16 columns keeps the compiler from interleaving all columns.
  template <Family family>
  __device__ __forceinline__ void differentiate(ActivationOf<float> const& act, float* g,
                                                uint32_t stage, uint32_t box, State& rows, int left,
                                                int thread) const {
    uint32_t const to = matrices_address(box, thread);
    typename Hidden::Codes codes;
#pragma unroll
    for (int block = 0; block < 8; block += 2) {
      if constexpr (of_codes) {
        if (block % 4 == 0) hidden.read_codes(codes, stage, block, thread);
      }
      float up[8] = {};
      if (8 * block < left) {
        typename Hidden::Values const h =
            hidden.values_at(codes, rows.h_scale, stage, block, thread);
        uint32_t a_word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float2 const x = h.gate[i], u = h.up[i];
          float* const v = g + 4 * block + 2 * i;
          asm volatile("" : "+f"(v[0]), "+f"(v[1]));
          float const low = at_element<family>(act, rows, i % 2, v[0], up[2 * i], x.x, u.x);
          float const high = at_element<family>(act, rows, i % 2, v[1], up[2 * i + 1], x.y, u.y);
          a_word[i] = pack<T>(low, high);
          take_larger(rows.gate[i % 2], v[0]);
          take_larger(rows.gate[i % 2], v[1]);
          take_larger(rows.a[i % 2], low);
          take_larger(rows.a[i % 2], high);
          if (act.gated) {
            take_larger(rows.up[i % 2], up[2 * i]);
            take_larger(rows.up[i % 2], up[2 * i + 1]);
          }
        }
        if (a.present || a_chunks.codes != nullptr) {
          store_matrices(to ^ (16 * block), a_word[0], a_word[1], a_word[2], a_word[3]);
        }
      }
      if (act.gated) hidden.leave_up(up, stage, block, thread);
    }
  }
};

}  // namespace guild::cuda
