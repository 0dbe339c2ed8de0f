// scaled_grouped_gemm(): tensor-core kernels, which ask for operands that TMA can load.
#include "check.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/products.h"
#include "cuda/rows/clear_tail.h"

namespace guild::cuda {
namespace {

void require_boxes(void const* data, int64_t stride, int64_t matrix_stride, char const* name) {
  require(
      reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 16 == 0 && matrix_stride % 16 == 0,
      name, ": expected 16-byte aligned data and strides on CUDA, got strides (", matrix_stride,
      ", ", stride, ") at address ", data);
}

}  // namespace

void scaled_grouped_gemm(ScaledGroupedGemm const& x, Queue queue) {
  check(x);
  require(x.halves == 1, "halves: expected 1, 2 are not built for CUDA yet");
  require(x.bias.data == nullptr, "bias: expected null, not built for CUDA yet");
  require(x.k % 16 == 0, "k: expected a multiple of 16 on CUDA, got ", x.k);
  require(x.b_format == Float8::e4m3, "b_format: expected e4m3 on CUDA, got e5m2");
  int64_t const a_stride = x.a.stride == 0 ? x.k : x.a.stride;
  int64_t const d_stride = x.d.stride == 0 ? x.n : x.d.stride;
  require_boxes(x.a.data, a_stride, 0, "a");
  require_boxes(x.b.data, x.b.out_stride, x.groups == 1 ? 0 : x.b.expert_stride, "b");
  if (x.m == 0) return;
  bool const is_float = x.out_dtype == DType::float32;
  clear_tail({.d = x.d.data,
              .row_stride = d_stride,
              .col_stride = 1,
              .last = x.offsets + x.groups - 1,
              .rows = x.m,
              .n = x.n,
              .element_bytes = is_float ? 4 : 2},
             queue);
  ScaledRowProduct product{.out_dtype = x.out_dtype,
                           .a_format = x.a_format,
                           .rows = x.m,
                           .n = x.n,
                           .k = x.k,
                           .groups = {x.offsets, int(x.groups), int(x.m)},
                           .a = x.a,
                           .a_scales = x.a_scales,
                           .b = x.b,
                           .b_scales = x.b_scales,
                           .d = {},
                           .direct = {}};
  bool const boxed = !is_float && reinterpret_cast<uintptr_t>(x.d.data) % 16 == 0 &&
                     d_stride % 8 == 0 && x.n % 8 == 0;
  if (boxed) {
    product.d = x.d;
  } else {
    product.direct = {.data = x.d.data,
                      .group_stride = 0,
                      .row_stride = d_stride,
                      .col_stride = 1,
                      .is_float = is_float,
                      .accumulate = false,
                      .columns = int(x.n)};
  }
  scaled_row_product(product, queue);
}

}  // namespace guild::cuda
