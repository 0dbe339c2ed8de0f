// Matrix products of the CPU backend: strided views in, a packed row-major matrix out.
#pragma once
#include <cstdint>

#include "cpu/element.h"
#include "cpu/scratch.h"
#include "guild/types.h"

namespace guild::cpu {

// Element (i, j) lies at data[i * row_stride + j * col_stride].
template <class T>
struct View {
  T const* data;
  int64_t row_stride, col_stride;

  T const* at(int64_t i, int64_t j) const { return data + i * row_stride + j * col_stride; }
  View from(int64_t i, int64_t j) const { return {at(i, j), row_stride, col_stride}; }
  View transposed() const { return {data, col_stride, row_stride}; }
};

// C (m, n), packed, = A (m, k) B (k, n), or += where added. One stride of A and one of B must be 1.
// One thread; the order of the sums depends on the sizes alone.
template <class F>
void multiply(View<F> a, View<F> b, F* c, int64_t m, int64_t n, int64_t k, bool add = false);

// A (rows x cols) in a form that multiply() accepts: the view itself if possible, else a copy.
template <class T>
View<Compute<T>> operand(Scratch& scratch, View<T> view, int64_t rows, int64_t cols) {
  using F = Compute<T>;
  if constexpr (std::is_same_v<T, F>) {
    if (view.row_stride == 1 || view.col_stride == 1) return view;
  }
  F* const copy = scratch.take<F>(rows * cols);
  if (view.row_stride == 1 && view.col_stride != 1) {  // keep memory order while converting
    for (int64_t j = 0; j < cols; ++j) load(view.at(0, j), 1, copy + j * rows, rows);
    return {copy, 1, rows};
  }
  for (int64_t i = 0; i < rows; ++i) load(view.at(i, 0), view.col_stride, copy + i * cols, cols);
  return {copy, cols, 1};
}

// Rows [first, first + count) of x. With row_token, gathers rows row_token[first + i] of x, which
// has `tokens` rows; indices out of range give zeros.
template <class T>
View<Compute<T>> gather(Scratch& scratch, T const* x, int64_t stride, int32_t const* row_token,
                        int64_t tokens, int64_t first, int64_t count, int64_t cols) {
  using F = Compute<T>;
  if (row_token == nullptr) {
    return operand(scratch, View<T>{x + first * stride, stride, 1}, count, cols);
  }
  F* const copy = scratch.take<F>(count * cols);
  for (int64_t i = 0; i < count; ++i) {
    int64_t const token = row_token[first + i];
    if (token >= 0 && token < tokens) {
      load(x + token * stride, 1, copy + i * cols, cols);
    } else {
      std::fill_n(copy + i * cols, cols, F(0));
    }
  }
  return {copy, cols, 1};
}

}  // namespace guild::cpu
