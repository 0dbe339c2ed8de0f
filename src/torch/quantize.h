// The ops of quantisation and of chunks: schemas and kernels. Codes are passed as uint8; formats
// and scales are the values of Float8 and ScaleKind.
//
//   quantize_rows_out     x (rows, columns) -> codes (rows, columns), scales (rows, ceil(columns /
//                         128)) float32
//   quantize_weights_out  w (E, out, in), up: the second half of a gated one -> codes (E, halves *
//                         out, in), `in` contiguous; transposed (E, in, halves * out), contiguous;
//                         scales (E, halves * ceil(out / 128), ceil(in / 128)) float32.
//                         experts_at (halves, E) int32: guild::Weight::expert_at of w and up
//   quantize_chunks_out   x (tokens or R, halves * columns), of codes with x_scales (tokens or R,
//                         halves * ceil(columns / 128)) -> codes (R / 128 + E, halves * columns,
//                         128), scales (R / 128 + E, halves * ceil(columns / 128)) float32
//   chunk_product_out     a (slots, out, 128), b (slots, in, 128), of chunks of `rows` rows -> out
//                         (E, out, in) of any strides, added to if accumulate
//   quantize_micro_out    x (rows, columns), values of Microscaling, MicroRounding and ScaleOrder
//                         -> codes (rows, columns), or (rows, columns / 2) of NVFP4; scales
//                         (micro_scale_bytes); global (1) float32 of NVFP4, read where given
//   regroup_micro_out     x (rows, columns), x_scales (rows, ceil(columns / 32)) bytes
//                         -> codes (rows, columns), scales (rows, ceil(columns / 128)) float32
#pragma once
#include "torch/tensors.h"

namespace guild::binding {

using Library = torch::stable::detail::StableLibrary;

void define_quantisers(Library& m);
void implement_quantisers(Library& m);
void define_microscaling(Library& m);
void implement_microscaling(Library& m);

}  // namespace guild::binding
