// The steps of a layer of quantised operands as ops.
#include "guild/float8_chunks.h"
#include "torch/float8.h"
#include "torch/ops.h"
#include "torch/overlap.h"

namespace guild::binding {

namespace {

// The first of these dtypes; bfloat16 without any.
DType element_of(std::initializer_list<MaybeTensor const*> tensors) {
  for (MaybeTensor const* t : tensors) {
    if (t->has_value()) return dtype_of(**t, "h");
  }
  return DType::bfloat16;
}

// Sizes of a step on the rows of `by_row`, gathered from those of x or the same ones; w is
// (E, out, in).
Sizes sizes_of(Tensor const& x, MaybeTensor const& row_token, Tensor const& w, bool down) {
  require_dims(x, down ? "dout" : "x", 2);
  require_dims(w, down ? "w_down" : "w_up", 3);
  Sizes s;
  s.tokens = x.size(0);
  s.slots = row_token.has_value() ? length_of(*row_token, "row_token") : x.size(0);
  s.experts = w.size(0);
  s.hidden = w.size(down ? 1 : 2);
  s.intermediate = w.size(down ? 2 : 1);
  return s;
}

// Codes and scales come together.
void require_both(MaybeTensor const& codes, MaybeTensor const& scales, char const* name,
                  char const* scales_name) {
  require(codes.has_value() == scales.has_value(), codes.has_value() ? scales_name : name,
          ": expected a tensor with ", codes.has_value() ? name : scales_name, ", got none");
}

// Codes of quantised values in halves, with their scales; nothing where they are absent.
struct Halves {
  Rows codes;
  Scales scales;
};
Halves halves_of(Place const& place, MaybeTensor const& codes, MaybeTensor const& scales,
                 char const* name, char const* scales_name, Sizes const& s, int64_t halves) {
  require_both(codes, scales, name, scales_name);
  if (!codes.has_value()) return {};
  return {
      codes_of(place, *codes, name, s.rows(), halves * s.intermediate),
      scales_of(place, *scales, scales_name, {s.rows(), halves * scale_blocks(s.intermediate)})};
}

// Chunks of `halves` parts of I columns; nothing where they are absent.
Chunks chunks_of(Place const& place, MaybeTensor const& codes, MaybeTensor const& scales,
                 char const* name, char const* scales_name, Sizes const& s, int64_t halves) {
  require_both(codes, scales, name, scales_name);
  if (!codes.has_value()) return {};
  int64_t const slots = chunk_slots(s.rows(), s.experts);
  Chunks chunks;
  chunks.codes = place.bytes(*codes, name, {slots, halves * s.intermediate, kScaleBlock});
  require(codes->is_contiguous(), name, ": expected a contiguous tensor");
  chunks.scales =
      scales_of(place, *scales, scales_name, {slots, halves * scale_blocks(s.intermediate)});
  return chunks;
}

// Gradients read the codes of H as E4M3.
void require_e4m3(MaybeTensor const& h_codes, Float8 format) {
  require(!h_codes.has_value() || format == Float8::e4m3,
          "format: expected 0 (E4M3) with h_codes, got ", int(format));
}

// x (T or R, H) codes, w_up, w_gate (E, I, H) codes, H contiguous -> a (R, I) codes; h (R, W) in
// the dtype of b_up and h, or h_codes (R, W), gate before up; scales as in guild/float8.h
void scaled_up_out(Tensor const& x, Tensor const& x_scales, int64_t x_format, Tensor const& offsets,
                   MaybeTensor const& row_token, Tensor const& w_up, Tensor const& up_scales,
                   MaybeTensor const& w_gate, MaybeTensor const& gate_scales,
                   MaybeTensor const& b_up, int64_t kind, bool gated, double alpha, double limit,
                   double up_offset, bool clamp_after, bool interleaved, int64_t format,
                   int64_t scale, MaybeTensor& h, MaybeTensor& h_codes, MaybeTensor& h_scales,
                   Tensor& a, Tensor& a_scales) {
  Place const place(x, "x");
  Sizes const s = sizes_of(x, row_token, w_up, false);
  int64_t const halves = gated ? 2 : 1, width = halves * s.intermediate;
  require(gated == w_gate.has_value() && gated == gate_scales.has_value(),
          "w_gate, gate_scales: expected tensors with a gate, and none without");
  ScaledUp args;
  args.sizes = s;
  args.dtype = element_of({&h, &b_up});
  args.activation = activation_of(kind, gated, alpha, limit, up_offset, clamp_after);
  args.order = order_of(interleaved);
  args.routing = routing_of(place, s, offsets, row_token);
  args.x_format = float8_of(x_format, "x_format");
  args.format = float8_of(format, "format");
  require_e4m3(h_codes, args.format);
  args.scale = scale_kind_of(scale);
  args.x = codes_of(place, x, "x", s.tokens, s.hidden);
  args.x_scales =
      as_read(scales_of(place, x_scales, "x_scales", {s.tokens, scale_blocks(s.hidden)}));
  auto const weight = [&](Tensor const& w, char const* name) -> ConstWeight {
    return {place.bytes(w, name, {s.experts, s.intermediate, s.hidden}), w.stride(0), w.stride(1),
            w.stride(2)};
  };
  auto const weight_scales = [&](Tensor const& t, char const* name) {
    Shape const shape{s.experts, scale_blocks(s.intermediate), scale_blocks(s.hidden)};
    return as_read(scales_of(place, t, name, shape));
  };
  args.w_up.gate = weight(gated ? *w_gate : w_up, gated ? "w_gate" : "w_up");
  args.w_scales.gate = weight_scales(gated ? *gate_scales : up_scales, "gate_scales");
  if (gated) {
    args.w_up.up = weight(w_up, "w_up");
    args.w_scales.up = weight_scales(up_scales, "up_scales");
  }
  args.bias = place.rows(b_up, "b_up", args.dtype, {s.experts, width});
  args.h = place.rows(h, "h", args.dtype, {s.rows(), width});
  Halves const kept = halves_of(place, h_codes, h_scales, "h_codes", "h_scales", s, halves);
  args.h_codes = kept.codes;
  args.h_scales = kept.scales;
  args.a = codes_of(place, a, "a", s.rows(), s.intermediate);
  args.a_scales = scales_of(place, a_scales, "a_scales", {s.rows(), scale_blocks(s.intermediate)});
  require_apart(
      {{"h", h}, {"h_codes", h_codes}, {"h_scales", h_scales}, {"a", a}, {"a_scales", a_scales}},
      {{"x", x},
       {"x_scales", x_scales},
       {"offsets", offsets},
       {"row_token", row_token},
       {"w_up", w_up},
       {"up_scales", up_scales},
       {"w_gate", w_gate},
       {"gate_scales", gate_scales},
       {"b_up", b_up}});
  place.run_product(cpu::scaled_up, cuda::scaled_up, args);
}

// The arguments of the down gradient, with its operands and h set.
ScaledDownGradient gradient_of(Place const& place, Sizes const& s, DType dtype, int64_t halves,
                               Tensor const& dout, Tensor const& dout_scales, Tensor const& w_down,
                               Tensor const& w_scales, MaybeTensor const& h,
                               MaybeTensor const& h_codes, MaybeTensor const& h_scales) {
  require(h.has_value() != h_codes.has_value(), "h: expected a tensor, or h_codes and h_scales");
  int64_t const hidden_blocks = scale_blocks(s.hidden);
  ScaledDownGradient args;
  args.sizes = s;
  args.dtype = dtype;
  args.dout = codes_of(place, dout, "dout", s.tokens, s.hidden);
  args.dout_scales =
      as_read(scales_of(place, dout_scales, "dout_scales", {s.tokens, hidden_blocks}));
  args.w_down = {place.bytes(w_down, "w_down", {s.experts, s.hidden, s.intermediate}),
                 w_down.stride(0), w_down.stride(1), w_down.stride(2)};
  args.w_scales = as_read(scales_of(place, w_scales, "w_scales",
                                    {s.experts, hidden_blocks, scale_blocks(s.intermediate)}));
  args.h = place.rows(h, "h", dtype, {s.rows(), halves * s.intermediate});
  Halves const kept = halves_of(place, h_codes, h_scales, "h_codes", "h_scales", s, halves);
  args.h_codes = kept.codes;
  args.h_scales = as_read(kept.scales);
  return args;
}

// dout (T or R, H) codes, w_down (E, H, I) codes, H contiguous; h as above -> dh_codes (R, W), gate
// before up; dh (R, W), a_scaled (R, I) in one dtype, that of h where given; score_parts float32;
// dh_chunks (slots, W, 128), a_chunks (slots, I, 128), scales as in guild/float8.h; like: of that
// dtype, to which A' is rounded, where the others are absent
void scaled_down_gradient_out(Tensor const& dout, Tensor const& dout_scales, int64_t dout_format,
                              Tensor const& offsets, MaybeTensor const& row_token,
                              MaybeTensor const& row_score, Tensor const& w_down,
                              Tensor const& w_scales, MaybeTensor const& h,
                              MaybeTensor const& h_codes, MaybeTensor const& h_scales, int64_t kind,
                              bool gated, double alpha, double limit, double up_offset,
                              bool clamp_after, bool interleaved, int64_t format, int64_t scale,
                              Tensor& dh_codes, Tensor& dh_scales, MaybeTensor& dh,
                              MaybeTensor& a_scaled, MaybeTensor& parts, MaybeTensor& dh_chunks,
                              MaybeTensor& dh_chunk_scales, MaybeTensor& a_chunks,
                              MaybeTensor& a_chunk_scales, MaybeTensor const& like) {
  Place const place(dout, "dout");
  Sizes const s = sizes_of(dout, row_token, w_down, true);
  int64_t const halves = gated ? 2 : 1;
  auto args = gradient_of(place, s, element_of({&h, &dh, &a_scaled, &like}), halves, dout,
                          dout_scales, w_down, w_scales, h, h_codes, h_scales);
  args.activation = activation_of(kind, gated, alpha, limit, up_offset, clamp_after);
  args.order = order_of(interleaved);
  args.routing = routing_of(place, s, offsets, row_token, row_score);
  args.dout_format = float8_of(dout_format, "dout_format");
  args.format = float8_of(format, "format");
  args.scale = scale_kind_of(scale);
  Halves const out = halves_of(place, dh_codes, dh_scales, "dh_codes", "dh_scales", s, halves);
  args.dh_codes = out.codes;
  args.dh_scales = out.scales;
  args.dh = place.rows(dh, "dh", args.dtype, {s.rows(), halves * s.intermediate});
  args.a_scaled = place.rows(a_scaled, "a_scaled", args.dtype, {s.rows(), s.intermediate});
  args.dh_chunks =
      chunks_of(place, dh_chunks, dh_chunk_scales, "dh_chunks", "dh_chunk_scales", s, halves);
  args.a_chunks = chunks_of(place, a_chunks, a_chunk_scales, "a_chunks", "a_chunk_scales", s, 1);
  if (parts.has_value()) {
    args.score_parts =
        place.packed(*parts, "score_parts", DType::float32, {s.rows(), score_parts(s)});
  }
  require_apart({{"dh_codes", dh_codes},
                 {"dh_scales", dh_scales},
                 {"dh", dh},
                 {"a_scaled", a_scaled},
                 {"score_parts", parts},
                 {"dh_chunks", dh_chunks},
                 {"dh_chunk_scales", dh_chunk_scales},
                 {"a_chunks", a_chunks},
                 {"a_chunk_scales", a_chunk_scales}},
                {{"dout", dout},
                 {"dout_scales", dout_scales},
                 {"offsets", offsets},
                 {"row_token", row_token},
                 {"row_score", row_score},
                 {"w_down", w_down},
                 {"w_scales", w_scales},
                 {"h", h},
                 {"h_codes", h_codes},
                 {"h_scales", h_scales}});
  place.run_product(cpu::scaled_down_gradient, cuda::scaled_down_gradient, args);
}

}  // namespace

void define_scaled_steps(Library& m) {
  m.def(
      "scaled_up_out(Tensor x, Tensor x_scales, int x_format, Tensor offsets, Tensor? row_token, "
      "Tensor w_up, Tensor up_scales, Tensor? w_gate, Tensor? gate_scales, Tensor? b_up, int kind, "
      "bool gated, float alpha, float limit, float up_offset, bool clamp_after, bool interleaved, "
      "int format, int scale, Tensor(a!)? h, Tensor(b!)? h_codes, Tensor(c!)? h_scales, Tensor(d!) "
      "a, Tensor(e!) a_scales) -> ()");
  m.def(
      "scaled_down_gradient_out(Tensor dout, Tensor dout_scales, int dout_format, Tensor offsets, "
      "Tensor? row_token, Tensor? row_score, Tensor w_down, Tensor w_scales, Tensor? h, Tensor? "
      "h_codes, Tensor? h_scales, int kind, bool gated, float alpha, float limit, float up_offset, "
      "bool clamp_after, bool interleaved, int format, int scale, Tensor(a!) dh_codes, Tensor(b!) "
      "dh_scales, Tensor(c!)? dh, Tensor(d!)? a_scaled, Tensor(e!)? score_parts, Tensor(f!)? "
      "dh_chunks=None, Tensor(g!)? dh_chunk_scales=None, Tensor(h!)? a_chunks=None, Tensor(i!)? "
      "a_chunk_scales=None, Tensor? like=None) -> ()");
}

void implement_scaled_steps(Library& m) {
  m.impl("scaled_up_out", TORCH_BOX(&scaled_up_out));
  m.impl("scaled_down_gradient_out", TORCH_BOX(&scaled_down_gradient_out));
}

}  // namespace guild::binding
