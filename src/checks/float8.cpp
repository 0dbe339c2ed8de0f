// Checks of the arguments of quantisation and of products of quantised operands.
#include "checks/float8_conditions.h"
#include "guild/float8_chunks.h"

namespace guild {
namespace {

// Checks the arguments that both steps that quantise their results have.
template <class Step>
void check_scaled_step(Step const& x) {
  check_layer(x.sizes, x.dtype, x.routing);
  check_element(x.dtype, "dtype");
  check_activation(x.activation, x.dtype);
  check_order(x.order);
  check_format(x.w_format, "w_format");
  check_format(x.format, "format");
  check_kind(x.scale);
}

}  // namespace

void check(QuantizeRows const& x) {
  check_size(x.rows, 0, kMostRows, "rows");
  check_size(x.columns, 1, kMostColumns, "columns");
  check_element(x.dtype, "dtype");
  check_format(x.format, "format");
  check_kind(x.scale);
  check_rows(x.x, x.rows, x.columns, "x");
  check_rows(x.codes, x.rows, x.columns, "codes");
  check_output_scales(x.scales, 1, x.rows, scale_blocks(x.columns), "scales");
}

void check(QuantizeWeights const& x) {
  check_size(x.experts, 1, kMostExperts, "experts");
  check_size(x.out, 1, kMostColumns, "out");
  check_size(x.in, 1, kMostColumns, "in");
  check_element(x.dtype, "dtype");
  check_format(x.format, "format");
  check_kind(x.scale);
  check_weight(x.w.gate, x.experts, x.out, x.in, "w.gate", false);
  if (x.halves() == 2) check_weight(x.w.up, x.experts, x.out, x.in, "w.up", false);
  int64_t const rows = x.halves() * x.out;
  check_size(rows, 1, kMostColumns, "out, of both halves");
  check_weight(x.codes, x.experts, rows, x.in, "codes", true);
  require(x.codes.expert_at == nullptr && x.transposed.expert_at == nullptr,
          "codes: expected evenly spaced matrices, without expert_at, got a pointer");
  if (x.transposed.data != nullptr) {
    check_weight(x.transposed, x.experts, rows, x.in, "transposed", true);
  }
  check_output_scales(x.scales, x.experts, x.halves() * scale_blocks(x.out), scale_blocks(x.in),
                      "scales");
}

void check(ScaledGroupedGemm const& x) {
  check_size(x.m, 0, kMostRows, "m");
  check_size(x.n, 1, kMostColumns, "n");
  check_size(x.k, 1, kMostColumns, "k");
  check_size(x.groups, 1, kMostExperts, "groups");
  check_size(x.halves, 1, 2, "halves");
  check_format(x.a_format, "a_format");
  check_format(x.b_format, "b_format");
  check_element(x.out_dtype, "out_dtype");
  check_pointer(x.offsets, true, "offsets");
  check_rows(x.a, x.m, x.halves * x.k, "a");
  int64_t const k_blocks = x.halves * scale_blocks(x.k);
  check_scales(x.a_scales, x.m > 0, {1, x.m, k_blocks}, "a_scales");
  check_weight(x.b, x.groups, x.n, x.halves * x.k, "b", false);
  require(x.b.in_stride == 1 || x.halves * x.k == 1, "b: expected K contiguous, got stride ",
          x.b.in_stride);
  check_scales(x.b_scales, true, {x.groups, scale_blocks(x.n), k_blocks}, "b_scales");
  check_rows(x.d, x.m, x.n, "d");
  check_optional_rows(x.bias, x.groups, x.n, "bias");
}

void check(ScaledUp const& x) {
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  check_scaled_step(x);
  check_format(x.x_format, "x_format");
  check_rows(x.x, input_rows(s, x.routing), s.hidden, "x");
  int64_t const tokens = input_rows(s, x.routing), depth = scale_blocks(s.hidden);
  int64_t const blocks = scale_blocks(s.intermediate), halves = gated ? 2 : 1;
  check_scales(x.x_scales, tokens > 0, {1, tokens, depth}, "x_scales");
  check_codes(x.w_up.gate, s.experts, s.intermediate, s.hidden, "w_up.gate");
  check_scales(x.w_scales.gate, true, {s.experts, blocks, depth}, "w_scales.gate");
  if (gated) {
    check_codes(x.w_up.up, s.experts, s.intermediate, s.hidden, "w_up.up");
    check_scales(x.w_scales.up, true, {s.experts, blocks, depth}, "w_scales.up");
  }
  check_optional_rows(x.bias, s.experts, width(s, gated), "bias");
  check_optional_rows(x.h, s.rows(), width(s, gated), "h");
  check_optional_rows(x.h_codes, s.rows(), width(s, gated), "h_codes");
  if (x.h_codes.data != nullptr) {
    check_output_scales(x.h_scales, 1, s.rows(), halves * blocks, "h_scales");
  }
  check_rows(x.a, s.rows(), s.intermediate, "a");
  check_output_scales(x.a_scales, 1, s.rows(), blocks, "a_scales");
}

void check(ScaledDownGradient const& x) {
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  check_scaled_step(x);
  bool const any = s.rows() > 0;
  check_format(x.dout_format, "dout_format");
  check_format(x.h_format, "h_format");
  check_rows(x.dout, input_rows(s, x.routing), s.hidden, "dout");
  int64_t const tokens = input_rows(s, x.routing), depth = scale_blocks(s.hidden);
  int64_t const blocks = scale_blocks(s.intermediate), halves = gated ? 2 : 1;
  check_scales(x.dout_scales, tokens > 0, {1, tokens, depth}, "dout_scales");
  check_weight(x.w_down, s.experts, s.hidden, s.intermediate, "w_down", false);
  require(x.w_down.out_stride == 1 || s.hidden == 1, "w_down: expected H contiguous, got stride ",
          x.w_down.out_stride);
  check_scales(x.w_scales, true, {s.experts, depth, blocks}, "w_scales");
  require(x.h.data == nullptr || x.h_codes.data == nullptr,
          "h_codes: expected null with h, got a pointer");
  if (x.h_codes.data == nullptr) check_rows(x.h, s.rows(), width(s, gated), "h");
  check_optional_rows(x.h_codes, s.rows(), width(s, gated), "h_codes");
  bool const has_codes = x.h_codes.data != nullptr;
  check_scales(x.h_scales, any && has_codes, {1, has_codes ? s.rows() : 0, halves * blocks},
               "h_scales");
  check_rows(x.dh_codes, s.rows(), width(s, gated), "dh_codes");
  check_output_scales(x.dh_scales, 1, s.rows(), halves * blocks, "dh_scales");
  check_optional_rows(x.dh, s.rows(), width(s, gated), "dh");
  check_optional_rows(x.a_scaled, s.rows(), s.intermediate, "a_scaled");
  bool const dh_chunks = x.dh_chunks.codes != nullptr;
  require(!dh_chunks || x.scale == ScaleKind::power_of_two,
          "dh_chunks: expected null with scale 0 (exact), got a pointer");
  int64_t const slots = any ? chunk_slots(s.rows(), s.experts) : 0;
  if (dh_chunks) {
    check_output_scales(x.dh_chunks.scales, 1, slots, halves * blocks, "dh_chunks.scales");
  }
  if (x.a_chunks.codes != nullptr) {
    check_output_scales(x.a_chunks.scales, 1, slots, blocks, "a_chunks.scales");
  }
}

}  // namespace guild
