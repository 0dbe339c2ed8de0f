// Quantisation to microscaling formats.
#include "guild/microscaling.h"

#include "torch/float8.h"
#include "torch/ops.h"
#include "torch/overlap.h"

namespace guild::binding {

namespace {

// x (rows, columns), values of Microscaling, MicroRounding and ScaleOrder -> codes (rows, columns),
// or (rows, columns / 2) of NVFP4; scales (micro_scale_bytes); global (1) float32 of NVFP4, read
// where given
void quantize_micro_out(Tensor const& x, int64_t format, int64_t rounding, int64_t order,
                        Tensor& codes, Tensor& scales, MaybeTensor& global, bool global_given) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  require(format >= 0 && format <= int(Microscaling::nvfp4), "format: expected 0 to 2, got ",
          format);
  require(rounding == 0 || rounding == 1, "rounding: expected 0 (floor) or 1 (ceil), got ",
          rounding);
  require(order == 0 || order == 1, "order: expected 0 (rows) or 1 (swizzled), got ", order);
  QuantizeMicro args;
  args.rows = x.size(0);
  args.columns = x.size(1);
  args.dtype = dtype_of(x, "x");
  args.format = Microscaling(format);
  args.rounding = MicroRounding(rounding);
  args.order = ScaleOrder(order);
  bool const narrow = args.format == Microscaling::nvfp4;
  args.x = place.rows(x, "x", args.dtype, {args.rows, args.columns});
  args.codes = codes_of(place, codes, "codes", args.rows, narrow ? args.columns / 2 : args.columns);
  int64_t const bytes = micro_scale_bytes(args.rows, args.columns, args.format, args.order);
  args.scales = place.bytes(scales, "scales", {bytes});
  require(bytes <= 1 || scales.stride(0) == 1, "scales: expected a contiguous tensor");
  require(narrow == global.has_value(), "global_scale: expected ", narrow ? "a tensor" : "none",
          " with this format");
  if (global.has_value()) {
    args.global = static_cast<float*>(place.packed(*global, "global_scale", DType::float32, {1}));
  }
  args.global_given = global_given;
  MaybeTensor const none;
  require_apart(
      {{"codes", codes}, {"scales", scales}, {"global_scale", global_given ? none : global}},
      {{"x", x}, {"global_scale", global_given ? global : none}});
  Tensor const workspace = place.workspace(narrow ? sizeof(uint32_t) : 0);
  args.workspace = static_cast<uint32_t*>(workspace.data_ptr());
  place.run(cpu::quantize_micro, cuda::quantize_micro, args);
}

// x (rows, columns), x_scales (rows, ceil(columns / 32)) bytes -> codes (rows, columns), scales
// (rows, ceil(columns / 128)) float32
void regroup_micro_out(Tensor const& x, Tensor const& x_scales, int64_t format, Tensor& codes,
                       Tensor& scales) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  RegroupMicro args;
  args.rows = x.size(0);
  args.columns = x.size(1);
  args.format = float8_of(format, "format");
  args.x = codes_of(place, x, "x", args.rows, args.columns);
  int64_t const blocks = (args.columns + 31) / 32;
  args.x_scales = place.bytes(x_scales, "x_scales", {args.rows, blocks});
  require(
      (blocks <= 1 || x_scales.stride(1) == 1) && (args.rows <= 1 || x_scales.stride(0) == blocks),
      "x_scales: expected a contiguous tensor");
  args.codes = codes_of(place, codes, "codes", args.rows, args.columns);
  args.scales = scales_of(place, scales, "scales", {args.rows, scale_blocks(args.columns)});
  require_apart({{"codes", codes}, {"scales", scales}}, {{"x", x}, {"x_scales", x_scales}});
  place.run(cpu::regroup_micro, cuda::regroup_micro, args);
}

}  // namespace

void define_microscaling(Library& m) {
  m.def(
      "quantize_micro_out(Tensor x, int format, int rounding, int order, Tensor(a!) codes, "
      "Tensor(b!) scales, Tensor(c!)? global_scale, bool global_given) -> ()");
  m.def(
      "regroup_micro_out(Tensor x, Tensor x_scales, int format, Tensor(a!) codes, Tensor(b!) "
      "scales) -> ()");
}

void implement_microscaling(Library& m) {
  m.impl("quantize_micro_out", TORCH_BOX(&quantize_micro_out));
  m.impl("regroup_micro_out", TORCH_BOX(&regroup_micro_out));
}

}  // namespace guild::binding
