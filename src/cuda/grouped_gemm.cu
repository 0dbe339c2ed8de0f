// grouped_gemm(): tensor-core kernels where the operands' strides allow TMA, the plain kernel
// otherwise. Groups along columns are solved as the transposed problem, D^T = B^T A^T.
#include "checks/check.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/plain_product.h"
#include "cuda/products.h"
#include "cuda/rows/ungrouped_rows.h"

namespace guild::cuda {
namespace {

using Ragged = GroupedGemm::Ragged;
using Operand = GroupedGemm::Operand;

Operand flipped(Operand const& x) {
  return {x.data, x.group_stride, x.col_stride, x.row_stride, x.group_at};
}

// Whether TMA can address it. Rows that are all the same one (stride 0) are for the plain kernel.
bool aligned(Operand const& x, int64_t row_stride) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && row_stride > 0 && row_stride % 8 == 0 &&
         x.group_stride % 8 == 0;
}

// B as expert weights (E, n, k), if one of its dimensions is contiguous and aligned.
bool weight_of(Operand const& b, ConstWeight& w) {
  w = {b.data, b.group_stride, b.col_stride, b.row_stride, b.group_at};
  if (w.in_stride == 1) return aligned(b, w.out_stride);
  return w.out_stride == 1 && aligned(b, w.in_stride);
}

// Whether rows of the bias are on boundaries of `bytes`.
bool lies_on(int64_t bytes, ConstRows const& bias, int64_t n) {
  return reinterpret_cast<uintptr_t>(bias.data) % bytes == 0 &&
         kElementBytes * row_stride(bias, n) % bytes == 0;
}

// For groups that split rows, where A and D of all groups form one matrix each; false if it cannot.
bool try_row_product(GroupedGemm const& x, Groups const& groups, int64_t rows, Queue queue) {
  ConstWeight w;
  bool const apart = x.a.group_at != nullptr || x.d.group_at != nullptr;
  bool const joined =
      !apart && (x.ragged != Ragged::none || (x.a.group_stride == x.m * x.a.row_stride &&
                                              x.d.group_stride == x.m * x.d.row_stride));
  if (!joined || x.a.col_stride != 1 || !aligned(x.a, x.a.row_stride) || !weight_of(x.b, w) ||
      !lies_on(4, x.bias, x.n) || x.n % 2 != 0) {
    return false;
  }
  RowProduct product{.dtype = x.dtype,
                     .rows = rows,
                     .n = x.n,
                     .k = x.k,
                     .groups = groups,
                     .a = {x.a.data, x.a.row_stride},
                     .w = {w, w},
                     .bias = x.bias,
                     .d = {},
                     .direct = {}};
  bool const boxed = x.out_dtype == x.dtype && !x.accumulate && x.d.col_stride == 1 &&
                     aligned(x.d, x.d.row_stride) && x.n % 8 == 0 && lies_on(16, x.bias, x.n);
  if (boxed) {
    product.d = {x.d.data, x.d.row_stride};
  } else {
    product.direct = {.data = x.d.data,
                      .group_stride = 0,
                      .row_stride = x.d.row_stride,
                      .col_stride = x.d.col_stride,
                      .is_float = x.out_dtype == DType::float32,
                      .accumulate = x.accumulate,
                      .columns = int(x.n)};
  }
  row_product(product, queue);
  return true;
}

bool try_expert_product(GroupedGemm const& x, Groups const& groups, Queue queue) {
  bool const fits = x.a.row_stride == 1 && aligned(x.a, x.a.col_stride) && x.b.col_stride == 1 &&
                    aligned(x.b, x.b.row_stride) && x.m % 8 == 0 && x.n % 8 == 0 &&
                    reinterpret_cast<uintptr_t>(x.d.data) % 16 == 0 && x.bias.data == nullptr;
  if (!fits) return false;
  expert_product({.dtype = x.dtype,
                  .m = x.m,
                  .n = x.n,
                  .rows = x.k,
                  .tokens = x.k,
                  .groups = groups,
                  .a = {x.a.data, x.a.col_stride},
                  .b = {x.b.data, x.b.row_stride},
                  .d_dtype = x.out_dtype,
                  .accumulate = x.accumulate,
                  .d = {x.d.data, x.d.group_stride, x.d.row_stride, x.d.col_stride, x.d.group_at}},
                 queue);
  return true;
}

}  // namespace

void grouped_gemm(GroupedGemm const& args, Queue queue) {
  check(args);
  require_16_bit(args.dtype);
  require_at_most(args.n, kMostCounted, "n");
  require_at_most(args.k, args.ragged == Ragged::inner ? kMostSummedRows : kMostCounted, "k");
  if (args.ragged == Ragged::none) {
    require_at_most(args.m * args.groups, kMostCounted, "groups * m");
  } else {
    require_at_most(args.m, kMostCounted, "m");
  }
  GroupedGemm x = args;
  if (x.ragged == Ragged::columns) {
    x.a = flipped(args.b);
    x.b = flipped(args.a);
    x.d = flipped(args.d);
    x.m = args.n;
    x.n = args.m;
    x.ragged = Ragged::rows;
  }
  bool const sum_groups = x.ragged == Ragged::inner, ragged_rows = x.ragged == Ragged::rows;
  // A ragged operand is one matrix for all groups: its group stride is ignored.
  if (sum_groups || ragged_rows) x.a.group_stride = 0;
  if (sum_groups) x.b.group_stride = 0;
  if (ragged_rows) x.d.group_stride = 0;
  int64_t const rows = x.ragged == Ragged::none ? x.m * x.groups : x.m;
  if (rows == 0 || x.n == 0) return;
  Groups const groups{x.offsets, int(x.groups), int(sum_groups ? x.k : rows)};
  if (ragged_rows && !x.accumulate) {
    clear_ungrouped_rows({.d = x.d.data,
                          .row_stride = x.d.row_stride,
                          .col_stride = x.d.col_stride,
                          .last = x.offsets + x.groups - 1,
                          .rows = rows,
                          .n = x.n,
                          .element_bytes = x.out_dtype == DType::float32 ? 4 : 2},
                         queue);
  }
  if (sum_groups ? try_expert_product(x, groups, queue)
                 : x.k > 0 && try_row_product(x, groups, rows, queue)) {
    return;
  }
  plain_product({.dtype = x.dtype,
                 .out_dtype = x.out_dtype,
                 .accumulate = x.accumulate,
                 .sum_groups = sum_groups,
                 .rows = int(rows),
                 .n = int(x.n),
                 .k = int(x.k),
                 .rows_per_group = x.ragged == Ragged::none ? int(x.m) : 0,
                 .groups = groups,
                 .a = x.a,
                 .b = x.b,
                 .d = x.d,
                 .bias = x.bias},
                queue);
}

}  // namespace guild::cuda
