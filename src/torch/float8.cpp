// The grouped product of quantised operands.
#include "torch/float8.h"

#include "torch/ops.h"
#include "torch/overlap.h"

namespace guild::binding {

namespace {

// a (M, K), a_scales (M, ceil(K / 128)), b (E, N, K), b_scales (E, ceil(N / 128), ceil(K / 128)),
// offs (E) ends -> out (M, N)
void scaled_grouped_mm_out(Tensor const& a, Tensor const& a_scales, int64_t a_format,
                           Tensor const& b, Tensor const& b_scales, int64_t b_format,
                           Tensor const& offs, Tensor& out, int64_t halves,
                           MaybeTensor const& bias) {
  Place const place(a, "a");
  require_dims(a, "a", 2);
  require_dims(b, "b", 3);
  int64_t const inner = a.size(1);
  require((halves == 1 || halves == 2) && inner % halves == 0,
          "halves: expected 1, or 2 with an even number of columns, got ", halves, " of ", inner,
          " columns");
  ScaledGroupedGemm args;
  args.m = a.size(0);
  args.k = inner / halves;
  args.halves = halves;
  args.groups = b.size(0);
  args.n = b.size(1);
  args.a_format = float8_of(a_format, "a_format");
  args.b_format = float8_of(b_format, "b_format");
  args.out_dtype = dtype_of(out, "out");
  args.offsets = place.indices(offs, "offs", {args.groups});
  args.a = codes_of(place, a, "a", args.m, inner);
  int64_t const blocks = halves * scale_blocks(args.k);
  args.a_scales = as_read(scales_of(place, a_scales, "a_scales", {args.m, blocks}));
  args.b = {place.bytes(b, "b", {args.groups, args.n, inner}), b.stride(0), b.stride(1),
            b.stride(2)};
  args.b_scales =
      as_read(scales_of(place, b_scales, "b_scales", {args.groups, scale_blocks(args.n), blocks}));
  args.d = place.rows(out, "out", args.out_dtype, {args.m, args.n});
  args.bias = place.rows(bias, "bias", args.out_dtype, {args.groups, args.n});
  require_apart({{"out", out}}, {{"a", a},
                                 {"a_scales", a_scales},
                                 {"b", b},
                                 {"b_scales", b_scales},
                                 {"offs", offs},
                                 {"bias", bias}});
  place.run_product(cpu::scaled_grouped_gemm, cuda::scaled_grouped_gemm, args);
}

}  // namespace

void define_float8(Library& m) {
  m.def(
      "scaled_grouped_mm_out(Tensor a, Tensor a_scales, int a_format, Tensor b, Tensor b_scales, "
      "int b_format, Tensor offs, Tensor(a!) out, int halves=1, Tensor? bias=None) -> ()");
}

void implement_float8(Library& m) {
  m.impl("scaled_grouped_mm_out", TORCH_BOX(&scaled_grouped_mm_out));
}

}  // namespace guild::binding
