// scaled_up() and scaled_down_gradient(): their arguments as the tensor-core kernels take them.
#include "checks/check.h"
#include "cuda/alignment.h"
#include "cuda/float8/require.h"
#include "cuda/float8/scaled_products.h"

namespace guild::cuda {
namespace {

void require_sizes(Sizes const& s, DType dtype) {
  require_16_bit(dtype);
  require_codes_width(s.hidden, "hidden");
  require_codes_width(s.intermediate, "intermediate");
  require_at_most(s.intermediate, int64_t(1) << 28, "intermediate");  // bytes of dH in 32 bits
  require_at_most(s.rows(), kMostCounted, "rows");
}

}  // namespace

void scaled_up(ScaledUp const& x, Queue queue) {
  check(x);
  Sizes const& s = x.sizes;
  require_sizes(s, x.dtype);
  require_e4m3(x.x_format, "x_format");
  require_e4m3(x.w_format, "w_format");
  require_codes(x.x, "x");
  require_codes(x.w_up.gate, s.experts, "w_up.gate");
  int64_t const rows = x.routing.row_token == nullptr ? s.rows() : s.tokens;
  require_scales(x.x_scales, 1, rows, scale_blocks(s.hidden), "x_scales");
  ConstScales const &gate = x.w_scales.gate, &up = x.w_scales.up;
  require_scales(gate, s.experts, scale_blocks(s.intermediate), scale_blocks(s.hidden), "w_scales");
  if (x.activation.gated) {
    require_codes(x.w_up.up, s.experts, "w_up.up");
    require(gate.expert_stride == up.expert_stride && gate.row_stride == up.row_stride &&
                gate.col_stride == up.col_stride,
            "w_scales: expected the same strides for gate and up on CUDA, got (",
            gate.expert_stride, ", ", gate.row_stride, ", ", gate.col_stride, ") and (",
            up.expert_stride, ", ", up.row_stride, ", ", up.col_stride, ")");
  }
  require_codes(x.h_codes, "h_codes");
  require_codes(x.a, "a");
  require_aligned(x.bias, "b_up");
  require_aligned(x.h, "h");
  require(x.h.data == nullptr || x.h_codes.data == nullptr,
          "h_codes: expected null with h on CUDA, got a pointer");
  scaled_up_product(x, queue);
}

void scaled_down_gradient(ScaledDownGradient const& x, Queue queue) {
  check(x);
  Sizes const& s = x.sizes;
  require_sizes(s, x.dtype);
  require_e4m3(x.w_format, "w_format");
  require_e4m3(x.h_format, "h_format");
  require_codes(x.dout, "dout");
  int64_t const rows = x.routing.row_token == nullptr ? s.rows() : s.tokens;
  require_scales(x.dout_scales, 1, rows, scale_blocks(s.hidden), "dout_scales");
  require_scales(x.w_scales, s.experts, scale_blocks(s.hidden), scale_blocks(s.intermediate),
                 "w_scales");
  require_codes(transposed(x.w_down), s.experts, "w_down");
  require_codes(x.dh_codes, "dh_codes");
  require_aligned(x.h, "h");
  require_aligned(x.dh, "dh");
  require_aligned(x.a_scaled, "a_scaled");
  require_codes(x.h_codes, "h_codes");
  require_codes(x.dh_chunks.codes, 0, 0, "dh_chunks");
  require_codes(x.a_chunks.codes, 0, 0, "a_chunks");
  scaled_down_gradient_product(x, queue);
}

}  // namespace guild::cuda
