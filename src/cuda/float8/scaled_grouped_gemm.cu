// scaled_grouped_gemm(): tensor-core kernels, which require operands that TMA can load.
#include "checks/check.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/float8/require.h"
#include "cuda/float8/scaled_products.h"
#include "cuda/rows/ungrouped_rows.h"

namespace guild::cuda {

void scaled_grouped_gemm(ScaledGroupedGemm const& x, Queue queue) {
  check(x);
  bool const is_float = x.out_dtype == DType::float32;
  require_codes_width(x.k, "k");
  require_at_most(x.m, kMostCounted, "m");
  require_e4m3(x.b_format, "b_format");
  require_codes(x.a, "a");
  require_codes(x.b, x.groups, "b");
  int64_t const blocks = x.halves * scale_blocks(x.k);
  require_scales(x.a_scales, 1, x.m, blocks, "a_scales");
  require_scales(x.b_scales, x.groups, scale_blocks(x.n), blocks, "b_scales");
  if (x.bias.data != nullptr) {
    require(!is_float, "bias: expected none with float32 results on CUDA");
    require_aligned(x.bias, "bias");
    require(x.n % 2 == 0, "n: expected an even number with a bias on CUDA, got ", x.n);
  }
  if (x.m == 0) return;
  int64_t const d_stride = row_stride(x.d, x.n);
  clear_ungrouped_rows({.d = x.d.data,
                        .row_stride = d_stride,
                        .col_stride = 1,
                        .last = x.offsets + x.groups - 1,
                        .rows = x.m,
                        .n = x.n,
                        .element_bytes = is_float ? 4 : 2},
                       queue);
  ScaledRowProduct product{.element = is_float ? DType::bfloat16 : x.out_dtype,
                           .a_format = x.a_format,
                           .rows = x.m,
                           .n = x.n,
                           .k = x.k,
                           .halves = x.halves,
                           .groups = {x.offsets, int(x.groups), int(x.m)},
                           .a = x.a,
                           .a_scales = x.a_scales,
                           .b = x.b,
                           .b_scales = x.b_scales,
                           .bias = x.bias,
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
