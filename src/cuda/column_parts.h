// Splits a forward's down projection and combine by output columns. Each part's rows are added up
// before the next part overwrites them, so that fewer bytes are in L2 at a time. Every column is
// computed as without the split.
#pragma once
#include <algorithm>
#include <type_traits>

#include "guild/steps.h"
#include "shared/dtype.h"
#include "shared/row_stride.h"
#include "shared/tiles.h"

namespace guild::cuda {

struct ColumnRange {
  int64_t first = 0, end = 0;
};

inline constexpr int64_t kTileColumns = 256;  // of the widest tile of a down projection

// Parts for a layer of these sizes. Measured on an H200 (docs/measured/few_tokens.md): one more
// costs some 8 us, so each should read a GB of weights, and have several tiles for every
// multiprocessor; little of Y stays in L2 anyway.
inline int64_t column_parts(Sizes const& s, DType dtype, int64_t multiprocessors) {
  constexpr int64_t kMostParts = 4, kTilesEach = 3, kLeastBytesOfY = 8 << 20;
  constexpr double kWeightBytes = 1e9;
  int64_t const row = s.hidden * element_bytes(dtype), across = ceil_div(s.hidden, kTileColumns);
  if (s.rows() < kLeastBytesOfY / row) return 1;
  double const weights = double(s.experts) * double(s.intermediate) * double(row);
  int64_t parts = int64_t(std::min(weights / kWeightBytes, double(kMostParts)));
  while (parts > 1 && s.experts * (across / parts) < kTilesEach * multiprocessors) --parts;
  return std::max<int64_t>(parts, 1);
}

// Part i of `parts`: whole tiles, but for the last one's end.
inline ColumnRange columns_of_part(int64_t columns, int64_t i, int64_t parts) {
  int64_t const tiles = ceil_div(columns, kTileColumns);
  return {tiles * i / parts * kTileColumns,
          std::min(columns, tiles * (i + 1) / parts * kTileColumns)};
}
// At least as many as any part has.
inline int64_t most_columns_of_part(int64_t columns, int64_t parts) {
  return std::min(columns, ceil_div(ceil_div(columns, kTileColumns), parts) * kTileColumns);
}

template <class Pointer>
Pointer after_elements(Pointer data, int64_t count, DType dtype) {
  using Byte = std::conditional_t<std::is_same_v<Pointer, void const*>, char const, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + count * element_bytes(dtype);
}

// rows: of a matrix of `width` columns.
template <class R>
R of_columns(R rows, int64_t width, ColumnRange const& part, DType dtype) {
  rows.stride = row_stride(rows, width);
  rows.data = after_elements(rows.data, part.first, dtype);
  return rows;
}

// Y has rows of the part alone.
inline DownProjection of_columns(DownProjection x, ColumnRange const& part) {
  x.bias = of_columns(x.bias, x.sizes.hidden, part, x.dtype);
  x.w_down.data = after_elements(x.w_down.data, part.first * x.w_down.out_stride, x.dtype);
  x.sizes.hidden = part.end - part.first;
  return x;
}
inline Combine of_columns(Combine x, ColumnRange const& part) {
  x.o = of_columns(x.o, x.sizes.hidden, part, x.dtype);
  x.residual = of_columns(x.residual, x.sizes.hidden, part, x.dtype);
  x.sizes.hidden = part.end - part.first;
  return x;
}

}  // namespace guild::cuda
