#include "cuda/float8/products.h"
#include "cuda/gate_up.h"
#include "cuda/sm90/float8/launch.cuh"
#include "cuda/sm90/float8/scaled_down_gradient.cuh"

namespace guild::cuda {
namespace {

template <class T, Known known>
ScaledDownGradientEpilogue<T, known> epilogue_of(ScaledDownGradient const& x, Pairing pairing) {
  Sizes const& s = x.sizes;
  int64_t const columns = s.intermediate;
  int const halves = x.activation.gated ? 2 : 1;
  bool const apart = pairing == Pairing::halves;
  ScaledDownGradientEpilogue<T, known> out{};
  out.h = row_map<T>(x.h, s.rows(), apart ? columns : halves * columns, apart ? 2 : 1, 64, "h");
  out.columns = int(columns);
  out.dh_codes = code_output(x.dh_codes, x.dh_scales, columns, halves, x.format, x.scale);
  out.dh = {byte_rows(x.dh, halves * columns, sizeof(T)), int(columns)};
  out.a = byte_rows(x.a_scaled, columns, sizeof(T));
  out.score = static_cast<float const*>(x.routing.row_score);
  out.parts = static_cast<float*>(x.score_parts);
  out.part_count = int(ceil_div(columns, kScoreColumns));
  out.activation = activation_in<float>(x.activation);
  out.pairing = {pairing};
  return out;
}

template <class T, bool gathered, Known known, Codes codes>
void launch_down_gradient(ScaledDownGradient const& x, Pairing pairing, Queue const& queue) {
  constexpr GemmConfig c = kScaledConfig;
  using Epilogue = ScaledDownGradientEpilogue<T, known>;
  using Kernel = ScaledProduct<c, CodeLoader<gathered>, Epilogue, codes>;
  Sizes const& s = x.sizes;
  int64_t const columns = s.intermediate, pairs = s.hidden / 2;
  typename Kernel::Params params{};
  params.work = {.groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
                 .tile_n = c.tile_n,
                 .across = int(ceil_div(columns, c.tile_n)),
                 .inner = int(ceil_div(pairs, c.tile_k)) * c.tile_k};
  fill_code_rows<gathered>(params.load, x.dout, s, x.routing.row_token, "dout");
  ConstWeight const w = in_pairs(transposed(x.w_down));
  params.load.b = weight_loader<CodePair, c, Major::K>(w, w, s.experts, columns, pairs, false,
                                                       INT32_MAX, "w_down");
  params.a_scales = x.dout_scales;
  params.b_scales = {x.w_scales.data, x.w_scales.expert_stride, x.w_scales.col_stride,
                     x.w_scales.row_stride};
  params.n_blocks = int(ceil_div(columns, kScaleBlock));
  params.epilogue = epilogue_of<T, known>(x, pairing);
  launch_scaled<Kernel>(params, s.rows(), queue);
}

}  // namespace

void scaled_down_gradient_product(ScaledDownGradient const& x, Queue const& queue) {
  if (x.sizes.rows() == 0) return;
  Pairing const pairing = pairing_of(x.activation.gated, x.order);
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    with_known(known_of(x.activation, pairing), [&](auto known) {
      with_codes(x.dout_format, [&](auto codes) {
        if (x.routing.row_token != nullptr) {
          launch_down_gradient<T, true, known.value, codes.value>(x, pairing, queue);
        } else {
          launch_down_gradient<T, false, known.value, codes.value>(x, pairing, queue);
        }
      });
    });
  });
}

}  // namespace guild::cuda
