// The down gradient's epilogue with quantised results. From g = dO W2 and the pre-activations H of
// the same tile:
//
//   dH = d activation(s g, H) as codes and scales,  dS: row sums of g A, one part per column tile
//
// and the operands of the weight gradients: dH and A' = s A in 16 bits, or chunks of both. H
// arrives through the ring of stages, in 16 bits or as codes, in units of 64 columns of the tile;
// two units share one scale.
#pragma once
#include "cuda/arch/cluster.cuh"
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/float8/hidden_units.cuh"
#include "cuda/sm90/float8/quantized_chunks.cuh"
#include "shared/gemm_config.h"

namespace guild::cuda {

template <class T, StaticActivation known, bool of_codes>
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
    // Largest magnitudes of the thread's share of a block, of these rows: of gate and up, and of
    // A' in either of two neighbouring columns, a pair of T.
    float largest[2][2];
    uint32_t largest_a[2];
  };
  // What a warp copies to shared memory before the sum: the scores of its 16 rows, and where the
  // group before the tile's ends.
  struct Ahead {
    uint32_t score[16], end_before;
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

  // Units of 64 columns in the tile. Blocks that split a tile by columns all return the first
  // block's number, so that their rings stay in step.
  __device__ int units(Tile const& tile) const {
    int const first = tile.apart ? tile.col - cluster_rank() * kScoreColumns : tile.col;
    return min((columns - first + 63) / 64, kScoreColumns / 64);
  }

  __device__ void load(Tile const& tile, int unit, char* to, Barrier& full) const {
    hidden.load(tile, unit, to, full);
  }

  // Called by whole warps.
  __device__ void fetch(Ahead& to, Tile const& tile, int thread) const {
    int const lane = thread % 32, r = thread / 32 * 16 + lane;
    __syncwarp();
    if (score != nullptr && lane < 16 && r < tile.rows) {
      copy_word_async(shared_address(&to.score[lane]), score + tile.row + r);
    }
    if (chunks() && lane == 16) {
      copy_word_async(shared_address(&to.end_before), groups.ends + tile.expert - 1);
    }
  }

  __device__ void begin(State& rows, Ahead const& ahead, Tile const& tile, int thread) const {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      bool const present = score != nullptr && fragment_row(thread) + 8 * below < tile.rows;
      uint32_t const bits = ahead.score[thread % 32 / 4 + 8 * below];
      rows.scale[below] = present ? __uint_as_float(bits) : 1.f;
      rows.dot[below] = 0;
    }
  }

  // Before the first of a block's units.
  __device__ void begin_block(State& rows, Tile const& tile, int unit, int thread) const {
    hidden.load_scales(rows.h_scale, tile, tile.col + 64 * unit, thread);
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      rows.largest[0][below] = rows.largest[1][below] = 0;
      rows.largest_a[below] = 0;
    }
  }

  // Turns a unit's 32 sums g into the gradients of gate. Leaves A' in a box of T and the gradients
  // of up, in float32, in place of H: keeping them in 64 more registers would spill.
  __device__ void read_unit(float* g, uint32_t stage, State& rows, Tile const& tile, int unit,
                            int thread, StoreBoxes const& boxes) const {
    int const col = tile.col + 64 * unit, left = columns - col;
    uint32_t const box = boxes.address(unit % 2);
    with_static_family<known>(activation, [&](auto family) {
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

  // Stores the gradients of the two units from `unit` on, and A' as a chunk. If there is only one
  // unit, the sums of the second are zeros, or NaN where the first one's are. Fences generic writes
  // to the stages before TMA refills them.
  __device__ void store_units(float const* gate, State const& rows, Stages const& stages,
                              Tile const& tile, int unit, int thread, StoreBoxes const& boxes,
                              ChunkShare const& share, Ahead const& ahead) const {
    int const col = tile.col + 64 * unit;
    if (col >= columns) return fence_async_proxy();
    bool const gated = hidden.pairing != Pairing::none, two = stages.b[1] != 0;
    if (chunks()) {
      float const of_a[2] = {larger_of_pair<T>(rows.largest_a[0]),
                             larger_of_pair<T>(rows.largest_a[1])};
      share.tell({magnitude(rows.largest[0], tile, thread),
                  magnitude(rows.largest[1], tile, thread), magnitude(of_a, tile, thread)},
                 thread);
    }
    RowScales<2> const scales =
        put_scales(rows.largest, dh_codes, tile, col, 0, gated ? 2 : 1, thread);
    CodeWords of_gate, of_up;
    if (dh.present()) {
      store_pairs(gate, stages, tile, col, thread, boxes);
      store_half(0, gate, {stages.a[0], stages.a[1]}, tile, col, thread);
    }
    encode(of_gate, dh_codes, gate, scales.to_code[0]);
    // Once the gradients of up are read, there is room where they were.
    uint32_t const box[2] = {stages.b[0] + Hidden::kBoxBytes,
                             two ? stages.b[1] + Hidden::kBoxBytes : boxes.address(1)};
    if (gated) {
      float up[64];
      hidden.load_up(up, stages.b[0], thread);
      hidden.load_up(up + 32, stages.b[1], thread);
      __syncwarp();
      store_half(1, up, {stages.b[0], stages.b[1]}, tile, col, thread);
      encode(of_up, dh_codes, up, scales.to_code[1]);
      codes_to_box(of_up, box[1], thread);
    }
    codes_to_box(of_gate, box[0], thread);
    __syncwarp();
    dh_codes.codes.store_codes(box[0], tile, col, columns, thread);
    if (gated) dh_codes.codes.store_codes(box[1], tile, columns + col, 2 * columns, thread);
    if (chunks()) {
      int const slot = slot_of(ahead.end_before, tile);
      store_chunks(of_gate, of_up, scales, stages, tile, slot, col, thread, boxes, share);
    } else {
      fence_async_proxy();
    }
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
  // 16 columns of A' in T, two neighbours of rows r and r + 8 a word.
  static __device__ void load_a(uint32_t (&word)[4], int i, int thread, StoreBoxes const& boxes) {
    load_matrices(matrices_address(boxes.address(i / 4), thread) ^ (i % 4 * 32), word[0], word[1],
                  word[2], word[3]);
  }

  __device__ int slot_of(int32_t end_before, Tile const& tile) const {
    int const begin = min(max(end_before, 0), groups.total);
    return begin / int(kScaleBlock) + tile.expert + (tile.row - begin) / int(kScaleBlock);
  }

  // Transposed boxes of gate and up lie in unused parts of the stages; that of A' lies where the
  // gradients of up were, once all of the consumer's warps have read them.
  __device__ void store_chunks(CodeWords& of_gate, CodeWords& of_up, RowScales<2> const& rows,
                               Stages const& stages, Tile const& tile, int slot, int col,
                               int thread, StoreBoxes const& boxes, ChunkShare const& share) const {
    bool const two = stages.b[1] != 0, gated = hidden.pairing != Pairing::none;
    if (dh.present()) {  // its stores use the same boxes
      wait_for_stores(thread);
      warpgroup_barrier();
    }
    // One unit's boxes are half as large.
    uint32_t const box[2] = {stages.a[0], two ? stages.a[1] : stages.a[0] + kBlockBytes / 2};
    float to_code[kMagnitudes];
    put_chunk_scales(to_code, share, slot, col, gated, thread);
    if (dh_chunks.codes != nullptr) {
      turn_rows(of_gate, rows.to_value[0], to_code[0], box[0], tile, col, thread);
      if (gated) turn_rows(of_up, rows.to_value[1], to_code[1], box[1], tile, col, thread);
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
      turn_a(to_code[2], stages.b[0], two, tile, col, thread, boxes);
      __syncwarp();
      order_rows(stages.b[0], columns - col, thread);
      fence_async_proxy();
      warpgroup_barrier();
      store_turned(a_chunks, stages.b[0], slot, 0, col, share, thread);
    }
    if (thread == 0) tma_store_commit();
  }

  // Makes and stores the scales of gate, up and A', eight lanes one each.
  __device__ void put_chunk_scales(float (&to_code)[kMagnitudes], ChunkShare const& share, int slot,
                                   int col, bool gated, int thread) const {
    int const of = share.heard_by(thread % 32);
    BlockScale const scale =
        block_scale(__uint_as_float(share.heard(thread)), of < 2 ? dh_codes.format : Float8::e4m3,
                    ScaleKind::power_of_two);
    if (share.group == 0 && thread < 8 * kMagnitudes && thread % 8 == 0) {
      if (of == 2) {
        if (a_chunks.codes != nullptr) a_chunks.put_scale(slot, 0, col, scale.to_value);
      } else if (dh_chunks.codes != nullptr && (of == 0 || gated)) {
        dh_chunks.put_scale(slot, of, col, scale.to_value);
      }
    }
#pragma unroll
    for (int i = 0; i < kMagnitudes; ++i) to_code[i] = __shfl_sync(~0u, scale.to_code, 8 * i);
  }

  // Converts codes from their rows' scales to the block's scale, and transposes them.
  __device__ void turn_rows(CodeWords& codes, float const (&to_value)[2], float to_code,
                            uint32_t box, Tile const& tile, int col, int thread) const {
    float const factor[2] = {to_value[0] * to_code, to_value[1] * to_code};
    if (dh_codes.format == Float8::e4m3) {
      scale_codes<Float8::e4m3>(codes, factor);
    } else {
      scale_codes<Float8::e5m2>(codes, factor);
    }
    clear_absent(codes, tile, thread);
    turn_codes(box, codes, columns - col, thread);
  }

  // A' of one or two units, which read_unit() has left in the boxes.
  __device__ void turn_a(float to_code, uint32_t to, bool two, Tile const& tile, int col,
                         int thread, StoreBoxes const& boxes) const {
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
        uint32_t const pair = encode_pair<Float8::e4m3>(v.x * to_code, v.y * to_code);
        codes.word[j % 2][i] |= pair << (j / 2 * 16);
      }
    }
    __syncwarp();
    clear_absent(codes, tile, thread);
    turn_codes(to, codes, columns - col, thread);
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
    typename Hidden::UnitCodes codes;
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
          take_larger_pair<T>(rows.largest_a[i % 2], a_word[i]);
          take_larger(rows.largest[0][i % 2], v[0]);
          take_larger(rows.largest[0][i % 2], v[1]);
          if (act.gated) {
            take_larger(rows.largest[1][i % 2], up[2 * i]);
            take_larger(rows.largest[1][i % 2], up[2 * i + 1]);
          }
        }
        store_matrices(to ^ (16 * block), a_word[0], a_word[1], a_word[2], a_word[3]);
      }
      if (act.gated) hidden.leave_up(up, stage, block, thread);
    }
  }
};

}  // namespace guild::cuda
