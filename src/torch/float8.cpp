// Quantisation by blocks, and the grouped product of quantised operands.
#include "torch/ops.h"

namespace guild::binding {

namespace {

int64_t blocks_of(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

Float8 format_of(int64_t format, char const* name) {
  require(format == 0 || format == 1, name, ": expected 0 (e4m3) or 1 (e5m2), got ", format);
  return Float8(format);
}
ScaleKind kind_of(int64_t kind) {
  require(kind == 0 || kind == 1, "scale: expected 0 (exact) or 1 (power of two), got ", kind);
  return ScaleKind(kind);
}

Scales scales_of(Place const& place, Tensor const& t, char const* name, Shape shape) {
  auto* const data = static_cast<float*>(place.typed(t, name, DType::float32, shape));
  int64_t const d = t.dim();
  return {data, d == 3 ? t.stride(0) : 0, t.stride(d - 2), t.stride(d - 1)};
}
ConstScales as_read(Scales const& s) {
  return {s.data, s.expert_stride, s.row_stride, s.col_stride};
}

// Rows of codes with contiguous columns.
Rows codes_of(Place const& place, Tensor const& t, char const* name, int64_t rows,
              int64_t columns) {
  void* const data = place.bytes(t, name, {rows, columns});
  require(columns <= 1 || t.stride(1) == 1, name,
          ": expected contiguous columns (stride 1), got stride ", t.stride(1));
  return {data, rows <= 1 ? 0 : t.stride(0)};
}

}  // namespace

void quantize_rows_out(Tensor const& x, int64_t format, int64_t scale, Tensor& codes,
                       Tensor& scales) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  QuantizeRows args;
  args.rows = x.size(0);
  args.columns = x.size(1);
  args.dtype = dtype_of(x, "x");
  args.format = format_of(format, "format");
  args.scale = kind_of(scale);
  args.x = place.rows(x, "x", args.dtype, {args.rows, args.columns});
  args.codes = codes_of(place, codes, "codes", args.rows, args.columns);
  args.scales = scales_of(place, scales, "scales", {args.rows, blocks_of(args.columns)});
  place.run(cpu::quantize_rows, cuda::quantize_rows, args);
}

void quantize_weights_out(Tensor const& w, int64_t format, int64_t scale, Tensor& codes,
                          MaybeTensor& transposed, Tensor& scales) {
  Place const place(w, "w");
  require_dims(w, "w", 3);
  QuantizeWeights args;
  args.experts = w.size(0);
  args.out = w.size(1);
  args.in = w.size(2);
  args.dtype = dtype_of(w, "w");
  args.format = format_of(format, "format");
  args.scale = kind_of(scale);
  args.w = place.weight(w, "w", args.dtype, {args.experts, args.out, args.in}, false);
  args.codes = {place.bytes(codes, "codes", {args.experts, args.out, args.in}), codes.stride(0),
                codes.stride(1), codes.stride(2)};
  if (transposed.has_value()) {
    args.transposed = {place.bytes(*transposed, "transposed", {args.experts, args.in, args.out}),
                       transposed->stride(0), transposed->stride(2), transposed->stride(1)};
  }
  args.scales =
      scales_of(place, scales, "scales", {args.experts, blocks_of(args.out), blocks_of(args.in)});
  place.run(cpu::quantize_weights, cuda::quantize_weights, args);
}

void scaled_grouped_mm_out(Tensor const& a, Tensor const& a_scales, int64_t a_format,
                           Tensor const& b, Tensor const& b_scales, int64_t b_format,
                           Tensor const& offs, Tensor& out) {
  Place const place(a, "a");
  require_dims(a, "a", 2);
  require_dims(b, "b", 3);
  ScaledGroupedGemm args;
  args.m = a.size(0);
  args.k = a.size(1);
  args.groups = b.size(0);
  args.n = b.size(1);
  args.a_format = format_of(a_format, "a_format");
  args.b_format = format_of(b_format, "b_format");
  args.out_dtype = dtype_of(out, "out");
  args.offsets = place.indices(offs, "offs", {args.groups});
  args.a = codes_of(place, a, "a", args.m, args.k);
  int64_t const blocks = blocks_of(args.k);
  args.a_scales = as_read(scales_of(place, a_scales, "a_scales", {args.m, blocks}));
  args.b = {place.bytes(b, "b", {args.groups, args.n, args.k}), b.stride(0), b.stride(1),
            b.stride(2)};
  args.b_scales =
      as_read(scales_of(place, b_scales, "b_scales", {args.groups, blocks_of(args.n), blocks}));
  args.d = place.rows(out, "out", args.out_dtype, {args.m, args.n});
  place.run_product(cpu::scaled_grouped_gemm, cuda::scaled_grouped_gemm, args);
}

}  // namespace guild::binding
