// The up projection of codes: its choice of a kernel, and its launch.
#include "cuda/float8/scaled_products.h"
#include "cuda/gate_up.h"
#include "cuda/sm90/float8/launch.cuh"
#include "cuda/sm90/float8/scaled_activate.cuh"

namespace guild::cuda {
namespace {

template <class T, bool gathered, StaticActivation known>
void launch_up(ScaledUp const& x, Pairing pairing, Queue const& queue) {
  constexpr GemmConfig c = kScaledConfig;
  using Kernel = ScaledProduct<c, CodeLoader<gathered>, ScaledActivate<T, known>, Codes::e4m3_e4m3>;
  Sizes const& s = x.sizes;
  bool const gated = x.activation.gated;
  int const halves = gated ? 2 : 1, tile_n = c.tile_n / halves;
  int64_t const columns = s.intermediate, pairs = s.hidden / 2;
  int const steps = int(ceil_div(pairs, c.tile_k));
  typename Kernel::Params params{};
  params.work = {.groups = expert_groups(x.routing.offsets, s.experts, s.rows()),
                 .tile_n = tile_n,
                 .across = int(ceil_div(columns, tile_n)),
                 .inner = steps * c.tile_k};
  fill_code_rows<gathered>(params.load, x.x, s, x.routing.row_token, "x");
  ConstWeight const gate = in_pairs(x.w_up.gate), up = gated ? in_pairs(x.w_up.up) : gate;
  params.load.b = weight_loader<CodePair, c, Major::K>(gate, up, s.experts, columns, pairs, gated,
                                                       INT32_MAX, "w_up");
  params.a_scales = x.x_scales;
  params.b_scales = x.w_scales.gate;
  params.second_scales = x.w_scales.up.data;
  params.n_blocks = int(ceil_div(columns, kScaleBlock));
  auto& out = params.epilogue;
  out.kept = x.h.data != nullptr         ? Kept::rounded
             : x.h_codes.data != nullptr ? Kept::codes
                                         : Kept::nothing;
  bool const apart = pairing == Pairing::halves;
  out.h = row_output<T>(x.h, s.rows(), apart ? columns : halves * columns, apart ? 2 : 1, "h");
  out.h_codes = code_output(x.h_codes, x.h_scales, columns, halves, x.format, x.scale);
  out.a = code_output(x.a, x.a_scales, columns, 1, x.format, x.scale);
  out.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, halves * columns)};
  out.columns = int(columns);
  out.activation = activation_in<float>(x.activation);
  out.pairing = {pairing};
  launch_scaled<Kernel>(params, s.rows(), queue);
}

}  // namespace

void scaled_up_product(ScaledUp const& x, Queue const& queue) {
  if (x.sizes.rows() == 0) return;
  Pairing const pairing = pairing_of(x.activation.gated, x.order);
  with_type(x.dtype, [&](auto element) {
    with_swiglu_or_any(static_activation_of(x.activation, pairing), [&](auto known) {
      if (x.routing.row_token != nullptr) {
        launch_up<decltype(element), true, known.value>(x, pairing, queue);
      } else {
        launch_up<decltype(element), false, known.value>(x, pairing, queue);
      }
    });
  });
}

}  // namespace guild::cuda
