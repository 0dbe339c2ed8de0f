// Checks of the arguments of microscaling formats.
#include "checks/microscaling.h"

#include "checks/float8_conditions.h"

namespace guild {

void check(QuantizeMicro const& x) {
  check_size(x.rows, 0, kMostRows, "rows");
  check_size(x.columns, 1, kMostColumns, "columns");
  check_element(x.dtype, "dtype");
  int const format = int(x.format);
  require(format >= 0 && format <= int(Microscaling::nvfp4), "format: expected 0 to 2, got ",
          format);
  bool const narrow = x.format == Microscaling::nvfp4;
  require(!narrow || x.columns % 2 == 0, "columns: expected an even number for NVFP4, got ",
          x.columns);
  require(int(x.rounding) == 0 || int(x.rounding) == 1,
          "rounding: expected 0 (floor) or 1 (ceil), got ", int(x.rounding));
  require(int(x.order) == 0 || int(x.order) == 1, "order: expected 0 (rows) or 1 (swizzled), got ",
          int(x.order));
  check_rows(x.x, x.rows, x.columns, "x");
  check_rows(x.codes, x.rows, narrow ? x.columns / 2 : x.columns, "codes");
  check_pointer(x.scales, x.rows > 0, "scales");
  check_pointer(x.global, narrow, "global");
}

void check(RegroupMicro const& x) {
  check_size(x.rows, 0, kMostRows, "rows");
  check_size(x.columns, 1, kMostColumns, "columns");
  check_format(x.format, "format");
  check_rows(x.x, x.rows, x.columns, "x");
  check_pointer(x.x_scales, x.rows > 0, "x_scales");
  check_rows(x.codes, x.rows, x.columns, "codes");
  check_output_scales(x.scales, 1, x.rows, scale_blocks(x.columns), "scales");
}

}  // namespace guild
