// The public structs' untyped memory as typed rows and matrices.
#pragma once
#include "cpu/blocks.h"
#include "cpu/product.h"
#include "guild/steps.h"
#include "shared/row_stride.h"

namespace guild::cpu {

template <class T>
struct TypedRows {
  T* data;
  int64_t stride;

  T* row(int64_t r) const { return data + r * stride; }
};

template <class T>
TypedRows<T const> rows_of(ConstRows const& rows, int64_t width) {
  return {static_cast<T const*>(rows.data), row_stride(rows, width)};
}
template <class T>
TypedRows<T> rows_of(Rows const& rows, int64_t width) {
  return {static_cast<T*>(rows.data), row_stride(rows, width)};
}

// The offset of matrix `index` from the first, in elements.
inline int64_t start_of(int64_t index, int64_t stride, int32_t const* at) {
  return placed(at, int(index)) * stride;
}

// One expert's weight as (out, in).
template <class T>
View<T> matrix_of(ConstWeight const& w, int64_t expert) {
  return {static_cast<T const*>(w.data) + start_of(expert, w.expert_stride, w.expert_at),
          w.out_stride, w.in_stride};
}

// Where one half of the pre-activations lies in a row: column i at [first + i * stride].
struct Half {
  int64_t first, stride;
};
constexpr Half gate_half(GateUp order, bool gated) {
  return {0, gated && order == GateUp::interleaved ? 2 : 1};
}
constexpr Half up_half(GateUp order, int64_t intermediate) {
  return order == GateUp::interleaved ? Half{1, 2} : Half{intermediate, 1};
}

// Stores packed C (rows x cols) to out[i * row_stride + j * col_stride], in out's memory order.
template <class T, class F>
void store_block(F* c, Span rows, Span cols, T* out, int64_t row_stride, int64_t col_stride,
                 bool add, Scratch& scratch) {
  out += rows.first * row_stride + cols.first * col_stride;
  if (row_stride >= col_stride) {
    for (int64_t i = 0; i < rows.count; ++i) {
      store(c + i * cols.count, out + i * row_stride, col_stride, cols.count, add);
    }
    return;
  }
  F* const column = scratch.take<F>(rows.count);
  for (int64_t j = 0; j < cols.count; ++j) {
    load(c + j, cols.count, column, rows.count);
    store(column, out + j * col_stride, row_stride, rows.count, add);
  }
}

}  // namespace guild::cpu
