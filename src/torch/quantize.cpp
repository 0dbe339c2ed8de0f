// Quantisation, and the products of chunks.
#include "torch/float8.h"
#include "torch/ops.h"
#include "torch/overlap.h"

namespace guild::binding {

namespace {

// x (rows, columns) -> codes (rows, columns), scales (rows, ceil(columns / 128)) float32
void quantize_rows_out(Tensor const& x, int64_t format, int64_t scale, Tensor& codes,
                       Tensor& scales) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  QuantizeRows args;
  args.rows = x.size(0);
  args.columns = x.size(1);
  args.dtype = dtype_of(x, "x");
  args.format = float8_of(format, "format");
  args.scale = scale_kind_of(scale);
  args.x = place.rows(x, "x", args.dtype, {args.rows, args.columns});
  args.codes = codes_of(place, codes, "codes", args.rows, args.columns);
  args.scales = scales_of(place, scales, "scales", {args.rows, scale_blocks(args.columns)});
  require_apart({{"codes", codes}, {"scales", scales}}, {{"x", x}});
  place.run(cpu::quantize_rows, cuda::quantize_rows, args);
}

// w (E, out, in), up: the second half of a gated one -> codes (E, halves * out, in), `in`
// contiguous; transposed (E, in, halves * out), contiguous; scales (E, halves * ceil(out / 128),
// ceil(in / 128)) float32. experts_at (halves, E) int32: guild::Weight::expert_at of w and up
void quantize_weights_out(Tensor const& w, int64_t format, int64_t scale, Tensor& codes,
                          MaybeTensor& transposed, Tensor& scales, MaybeTensor const& up,
                          MaybeTensor const& experts_at) {
  Place const place(w, "w");
  require_dims(w, "w", 3);
  require_dims(codes, "codes", 3);
  QuantizeWeights args;
  args.experts = w.size(0);
  args.out = w.size(1);
  args.in = w.size(2);
  args.dtype = dtype_of(w, "w");
  args.format = float8_of(format, "format");
  args.scale = scale_kind_of(scale);
  int64_t const halves = up.has_value() ? 2 : 1;
  Shape const shape{args.experts, args.out, args.in};
  int32_t const* const at = place.lists(experts_at, "experts_at", halves, args.experts);
  Weight gate = place.weight(w, "w", args.dtype, shape, false);
  gate.expert_at = at;
  args.w.gate = gate;
  if (up.has_value()) {
    Weight second = place.weight(*up, "up", args.dtype, shape, false);
    second.expert_at = at == nullptr ? nullptr : at + args.experts;
    args.w.up = second;
  }
  int64_t const rows = halves * args.out;
  args.codes = {place.bytes(codes, "codes", {args.experts, rows, args.in}), codes.stride(0),
                codes.stride(1), codes.stride(2)};
  if (transposed.has_value()) {
    require_dims(*transposed, "transposed", 3);
    args.transposed = {place.bytes(*transposed, "transposed", {args.experts, args.in, rows}),
                       transposed->stride(0), transposed->stride(2), transposed->stride(1)};
  }
  args.scales = scales_of(place, scales, "scales",
                          {args.experts, halves * scale_blocks(args.out), scale_blocks(args.in)});
  require_apart({{"codes", codes}, {"transposed", transposed}, {"scales", scales}},
                {{"w", own_memory(w, experts_at)},
                 {"up", own_memory(up, experts_at)},
                 {"experts_at", experts_at}});
  place.run(cpu::quantize_weights, cuda::quantize_weights, args);
}

// x (tokens or R, halves * columns), of codes with x_scales (tokens or R, halves * ceil(columns /
// 128)) -> codes (R / 128 + E, halves * columns, 128), scales (R / 128 + E, halves * ceil(columns /
// 128)) float32
void quantize_chunks_out(Tensor const& x, MaybeTensor const& x_scales, Tensor const& offsets,
                         MaybeTensor const& row_token, int64_t halves, int64_t format,
                         int64_t scale, Tensor& codes, Tensor& scales) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  require_dims(offsets, "offsets", 1);
  require((halves == 1 || halves == 2) && x.size(1) % halves == 0,
          "halves: expected 1, or 2 of as many columns, got ", halves, " of ", x.size(1),
          " columns");
  QuantizeChunks args;
  int64_t const height = x.size(0), width = x.size(1);
  args.tokens = height;
  args.rows = row_token.has_value() ? length_of(*row_token, "row_token") : height;
  args.groups = offsets.size(0) - 1;
  args.halves = halves;
  args.columns = width / halves;
  args.format = float8_of(format, "format");
  args.offsets = place.indices(offsets, "offsets", {args.groups + 1});
  if (row_token.has_value()) {
    args.row_token = place.indices(*row_token, "row_token", {args.rows});
  }
  int64_t const blocks = halves * scale_blocks(args.columns);
  if (x_scales.has_value()) {
    args.x = codes_of(place, x, "x", height, width);
    args.x_scales = as_read(scales_of(place, *x_scales, "x_scales", {height, blocks}));
  } else {
    args.dtype = dtype_of(x, "x");
    args.scale = scale_kind_of(scale);
    args.x = place.rows(x, "x", args.dtype, {height, width});
  }
  int64_t const slots = chunk_slots(args.rows, args.groups);
  args.codes = place.bytes(codes, "codes", {slots, width, kScaleBlock});
  require(codes.is_contiguous(), "codes: expected a contiguous tensor");
  args.scales = scales_of(place, scales, "scales", {slots, blocks});
  require_apart({{"codes", codes}, {"scales", scales}},
                {{"x", x}, {"x_scales", x_scales}, {"offsets", offsets}, {"row_token", row_token}});
  place.run(cpu::quantize_chunks, cuda::quantize_chunks, args);
}

ConstChunks chunks_of(Place const& place, Tensor const& codes, char const* name,
                      Tensor const& scales, char const* scales_name, int64_t slots) {
  int64_t const columns = codes.size(1);
  ConstChunks chunks;
  chunks.codes = place.bytes(codes, name, {slots, columns, kScaleBlock});
  require(codes.stride(2) == 1 && (columns <= 1 || codes.stride(1) == kScaleBlock), name,
          ": expected the 128 codes of a column contiguous and columns 128 apart, got strides (",
          codes.stride(0), ", ", codes.stride(1), ", ", codes.stride(2), ")");
  require(slots <= 1 || codes.stride(0) >= columns * kScaleBlock, name,
          ": expected slots that do not overlap, got stride ", codes.stride(0));
  chunks.slot_stride = slots <= 1 ? 0 : codes.stride(0);
  chunks.scales = as_read(scales_of(place, scales, scales_name, {slots, scale_blocks(columns)}));
  return chunks;
}

// a (slots, out, 128), b (slots, in, 128), of chunks of `rows` rows -> out (E, out, in) of any
// strides, added to if accumulate
void chunk_product_out(Tensor const& a, Tensor const& a_scales, int64_t a_format, Tensor const& b,
                       Tensor const& b_scales, Tensor const& offsets, int64_t rows, Tensor& out,
                       bool accumulate, MaybeTensor const& experts_at) {
  Place const place(a, "a");
  require_dims(a, "a", 3);
  require_dims(b, "b", 3);
  require_dims(out, "out", 3);
  require_dims(offsets, "offsets", 1);
  ChunkProduct args;
  args.rows = rows;
  args.groups = offsets.size(0) - 1;
  args.out = a.size(1);
  args.in = b.size(1);
  args.a_format = float8_of(a_format, "a_format");
  args.offsets = place.indices(offsets, "offsets", {args.groups + 1});
  require(rows >= 0, "rows: expected at least 0, got ", rows);
  int64_t const slots = chunk_slots(rows, args.groups);
  args.a = chunks_of(place, a, "a", a_scales, "a_scales", slots);
  args.b = chunks_of(place, b, "b", b_scales, "b_scales", slots);
  args.d_dtype = dtype_of(out, "out");
  args.accumulate = accumulate;
  args.d = place.weight(out, "out", args.d_dtype, {args.groups, args.out, args.in}, false);
  args.d.expert_at = place.lists(experts_at, "experts_at", 1, args.groups);
  require_apart({{"out", own_memory(out, experts_at)}}, {{"a", a},
                                                         {"b", b},
                                                         {"a_scales", a_scales},
                                                         {"b_scales", b_scales},
                                                         {"offsets", offsets},
                                                         {"experts_at", experts_at}});
  place.run_product(cpu::chunk_product, cuda::chunk_product, args);
}

}  // namespace

void define_quantize(Library& m) {
  m.def(
      "quantize_rows_out(Tensor x, int format, int scale, Tensor(a!) codes, Tensor(b!) scales) -> "
      "()");
  m.def(
      "quantize_weights_out(Tensor w, int format, int scale, Tensor(a!) codes, Tensor(b!)? "
      "transposed, Tensor(c!) scales, Tensor? up=None, Tensor? experts_at=None) -> ()");
  m.def(
      "quantize_chunks_out(Tensor x, Tensor? x_scales, Tensor offsets, Tensor? row_token, int "
      "halves, int format, int scale, Tensor(a!) codes, Tensor(b!) scales) -> ()");
  m.def(
      "chunk_product_out(Tensor a, Tensor a_scales, int a_format, Tensor b, Tensor b_scales, "
      "Tensor offsets, int rows, Tensor(a!) out, bool accumulate, Tensor? experts_at=None) -> ()");
}

void implement_quantize(Library& m) {
  m.impl("quantize_rows_out", TORCH_BOX(&quantize_rows_out));
  m.impl("quantize_weights_out", TORCH_BOX(&quantize_weights_out));
  m.impl("quantize_chunks_out", TORCH_BOX(&quantize_chunks_out));
  m.impl("chunk_product_out", TORCH_BOX(&chunk_product_out));
}

}  // namespace guild::binding
