// Rows quantised as chunks, and their products, the weight gradients.
#include "checks/float8_chunks.h"
#include "cpu/float8/scaled_sums.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

// Rows of a chunk: `count` of them from row `first` on, of the 128 of `slot`.
struct Chunk {
  int64_t slot, first, count;
};

std::vector<Chunk> chunks_of(Groups const& groups) {
  std::vector<Chunk> all;
  for (Block const& group : group_rows(groups)) {
    int64_t const slot = group.rows.first / kScaleBlock + group.expert;
    for (Span const& rows : spans(group.rows.count, kScaleBlock)) {
      all.push_back({slot + rows.first / kScaleBlock, group.rows.first + rows.first, rows.count});
    }
  }
  return all;
}

// A block of a chunk before it is transposed, and the scale that its codes will have.
struct ChunkBlock {
  float value[kScaleBlock][kScaleBlock];  // (rows, columns)
  float scale;                            // of the codes
};

int64_t source_row(QuantizeChunks const& x, int64_t row) {  // -1: zeros
  if (x.row_token == nullptr) return row;
  int64_t const token = x.row_token[row];
  return token >= 0 && token < x.tokens ? token : -1;
}

// value: elements times 1 / scale.
template <class T>
void read_elements(QuantizeChunks const& x, Chunk const& chunk, int64_t column, int64_t count,
                   ChunkBlock& block) {
  auto const rows = rows_of<T>(x.x, x.halves * x.columns);
  float largest = 0;
  for (int64_t i = 0; i < chunk.count; ++i) {
    int64_t const row = source_row(x, chunk.first + i);
    std::fill_n(block.value[i], count, 0.f);
    if (row >= 0) load(rows.row(row) + column, 1, block.value[i], count);
    largest = largest_of(block.value[i], count, largest);
  }
  auto const scale = block_scale(largest, x.format, x.scale);
  for (int64_t i = 0; i < chunk.count; ++i) {
    if (source_row(x, chunk.first + i) < 0) continue;  // zeros, whatever the scale
    for (int64_t j = 0; j < count; ++j) block.value[i][j] *= scale.to_code;
  }
  block.scale = scale.to_value;
}

// value: codes times their scale / the largest scale; scales are those of column `scale_column`.
void read_codes(QuantizeChunks const& x, Chunk const& chunk, int64_t column, int64_t scale_column,
                int64_t count, ChunkBlock& block) {
  auto const rows = rows_of<uint8_t>(x.x, x.halves * x.columns);
  float scale[kScaleBlock];
  block.scale = block_scale(0, x.format, ScaleKind::power_of_two).to_value;
  for (int64_t i = 0; i < chunk.count; ++i) {
    int64_t const row = source_row(x, chunk.first + i);
    scale[i] = row < 0 ? 0 : *scale_at(x.x_scales, 0, row, scale_column);
    block.scale = largest_of(&scale[i], 1, block.scale);
  }
  auto const& value_of = values_of(x.format);
  for (int64_t i = 0; i < chunk.count; ++i) {
    int64_t const row = source_row(x, chunk.first + i);
    float const quotient = scale[i] / block.scale;
    for (int64_t j = 0; j < count; ++j) {
      block.value[i][j] = row < 0 ? 0 : value_of[rows.row(row)[column + j]] * quotient;
    }
  }
}

void write_turned(QuantizeChunks const& x, Chunk const& chunk, int64_t column, int64_t count,
                  ChunkBlock const& block) {
  uint8_t* const to = x.codes + (chunk.slot * x.halves * x.columns + column) * kScaleBlock;
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < kScaleBlock; ++i) {
      float const value = i < chunk.count ? block.value[i][j] : 0;
      to[j * kScaleBlock + i] = encode_rescaled(value, x.format);
    }
  }
}

template <class T>
void quantize_chunk(QuantizeChunks const& x, Chunk const& chunk) {
  ChunkBlock block;
  int64_t const blocks = scale_blocks(x.columns);
  for (int64_t i = 0; i < x.halves * blocks; ++i) {
    int64_t const first = i % blocks * kScaleBlock, column = i / blocks * x.columns + first;
    int64_t const count = std::min(kScaleBlock, x.columns - first);
    if (x.x_scales.data != nullptr) {
      read_codes(x, chunk, column, i, count, block);
    } else {
      read_elements<T>(x, chunk, column, count, block);
    }
    *scale_at(x.scales, 0, chunk.slot, i) = block.scale;
    write_turned(x, chunk, column, count, block);
  }
}

// One operand's columns of a chunk as values, (count, 128).
void decode_columns(ConstChunks const& x, int64_t columns, Float8 format, int64_t slot, Span span,
                    float* to) {
  auto const& value_of = values_of(format);
  int64_t const stride = x.slot_stride == 0 ? columns * kScaleBlock : x.slot_stride;
  uint8_t const* const from = x.codes + slot * stride + span.first * kScaleBlock;
  for (int64_t i = 0; i < span.count * kScaleBlock; ++i) to[i] = value_of[from[i]];
}

template <class D>
void product_block(ChunkProduct const& x, Block const& group, Span outs, Span ins) {
  if (group.rows.count == 0 && x.accumulate) return;
  Scratch scratch;
  float* const sum = scratch.take<float>(outs.count * ins.count);
  float* const part = scratch.take<float>(outs.count * ins.count);
  float* const a = scratch.take<float>(outs.count * kScaleBlock);
  float* const b = scratch.take<float>(ins.count * kScaleBlock);
  std::fill_n(sum, outs.count * ins.count, 0.f);
  int64_t const first = group.rows.first / kScaleBlock + group.expert;
  for (int64_t slot = first; slot < first + scale_blocks(group.rows.count); ++slot) {
    decode_columns(x.a, x.out, x.a_format, slot, outs, a);
    decode_columns(x.b, x.in, Float8::e4m3, slot, ins, b);
    multiply(View<float>{a, kScaleBlock, 1}, View<float>{b, 1, kScaleBlock}, part, outs.count,
             ins.count, kScaleBlock);
    for (int64_t i = 0; i < outs.count; ++i) {
      float const scale = *scale_at(x.a.scales, 0, slot, (outs.first + i) / kScaleBlock);
      for (int64_t j = 0; j < ins.count; ++j) {
        sum[i * ins.count + j] +=
            part[i * ins.count + j] *
            (scale * *scale_at(x.b.scales, 0, slot, (ins.first + j) / kScaleBlock));
      }
    }
  }
  D* const d = static_cast<D*>(x.d.data) + start_of(group.expert, x.d.expert_stride, x.d.expert_at);
  store_block(sum, outs, ins, d, x.d.out_stride, x.d.in_stride, x.accumulate, scratch);
}

}  // namespace

void quantize_chunks(QuantizeChunks const& x) {
  require_processor();
  check(x);
  auto const chunks = chunks_of(expert_groups(x.offsets, x.groups, x.rows));
  with_narrow_element(x.dtype, [&]<class T> {
    parallel(int64_t(chunks.size()), double(x.rows * x.halves * x.columns),
             [&](int64_t i) { quantize_chunk<T>(x, chunks[i]); });
  });
}

void chunk_product(ChunkProduct const& x) {
  require_processor();
  check(x);
  auto const groups = group_rows(expert_groups(x.offsets, x.groups, x.rows));
  std::vector<std::pair<Span, Span>> tiles;
  for (Span const& o : spans(x.out, kBlockRows)) {
    for (Span const& i : spans(x.in, kBlockColumns)) tiles.emplace_back(o, i);
  }
  with_narrow_element(x.d_dtype, [&]<class D> {
    parallel_pairs(groups, tiles, double(x.rows) * double(x.out * x.in),
                   [&](Block const& group, auto const& tile) {
                     product_block<D>(x, group, tile.first, tile.second);
                   });
  });
}

}  // namespace guild::cpu
