// Checks of the arguments of chunks and their products.
#include "checks/float8_chunks.h"

#include <string>

#include "checks/float8_conditions.h"

namespace guild {

void check(QuantizeChunks const& x) {
  check_size(x.rows, 0, kMostRows, "rows");
  check_size(x.groups, 1, kMostExperts, "groups");
  check_size(x.columns, 1, kMostColumns, "columns");
  check_size(x.halves, 1, 2, "halves");
  bool const gathers = x.row_token != nullptr, has_codes = x.x_scales.data != nullptr;
  int64_t const height = gathers ? x.tokens : x.rows;
  check_size(height, 0, kMostRows, "tokens");
  check_element(x.dtype, "dtype");
  check_format(x.format, "format");
  if (!has_codes) check_kind(x.scale);
  check_pointer(x.offsets, true, "offsets");
  check_rows(x.x, height, x.halves * x.columns, "x");
  check_scales(x.x_scales, false, {1, height, x.halves * scale_blocks(x.columns)}, "x_scales");
  check_pointer(x.codes, true, "codes");
  check_output_scales(x.scales, 1, chunk_slots(x.rows, x.groups),
                      x.halves * scale_blocks(x.columns), "scales");
}

namespace {

// name: of x.
void check_chunks(ConstChunks const& x, int64_t slots, int64_t columns, std::string const& name) {
  std::string const codes = name + ".codes", scales = name + ".scales";
  check_pointer(x.codes, true, codes.c_str());
  require(x.slot_stride == 0 || x.slot_stride >= columns * kScaleBlock, name,
          ".slot_stride: expected at least ", columns * kScaleBlock, ", or 0, got ", x.slot_stride);
  check_reach({{{1, 0}, {slots, x.slot_stride}, {columns * kScaleBlock, 1}}}, codes.c_str());
  check_scales(x.scales, true, {1, slots, scale_blocks(columns)}, scales.c_str());
}

}  // namespace

void check(ChunkProduct const& x) {
  check_size(x.rows, 0, kMostRows, "rows");
  check_size(x.groups, 1, kMostExperts, "groups");
  check_size(x.out, 1, kMostColumns, "out");
  check_size(x.in, 1, kMostColumns, "in");
  check_format(x.a_format, "a_format");
  check_element(x.d_dtype, "d_dtype");
  check_pointer(x.offsets, true, "offsets");
  int64_t const slots = chunk_slots(x.rows, x.groups);
  check_chunks(x.a, slots, x.out, "a");
  check_chunks(x.b, slots, x.in, "b");
  check_weight(x.d, x.groups, x.out, x.in, "d", true);
}

}  // namespace guild
