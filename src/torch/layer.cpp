// Whole layers, forward and backward: from tokens with ids and scores, or from rows already sorted.
#include "torch/ops.h"

namespace guild::binding {

namespace {

// Bits of `wanted`. kRows: dx by row, not summed over a token's rows, in place of kX.
enum Wanted : int64_t {
  kX = 1,
  kScores = 2,
  kUp = 4,
  kDown = 8,
  kUpBias = 16,
  kDownBias = 32,
  kRows = 64
};

constexpr Slots kSortedRows{.tokens = 0, .top_k = 1};  // one a row

struct Flags {
  bool interleaved, transposed;
};

Layer layer_of(Tensor const& x, Slots const& slots, Tensor const& w_down, Activation activation,
               Flags flags) {
  require_dims(x, "x", 2);
  require_dims(w_down, "w_down", 3);
  Sizes const sizes{.tokens = x.size(0),
                    .hidden = x.size(1),
                    .intermediate = w_down.size(flags.transposed ? 1 : 2),
                    .experts = w_down.size(0),
                    .top_k = slots.top_k,
                    .slots = slots.count};
  return {sizes, dtype_of(x, "x"), activation,
          flags.interleaved ? GateUp::interleaved : GateUp::concatenated, flags.transposed};
}

struct Weights {
  Tensor const& up;
  MaybeTensor const& gate;
  Tensor const& down;
};

// The arguments that all forward calls share; o and h are made by the caller.
MoeForward forward_args(Place const& place, Layer const& layer, Routing const& routing,
                        Tensor const& x, Weights const& w, MaybeTensor const& b_up,
                        MaybeTensor const& b_down, Tensor const& workspace) {
  Sizes const& s = layer.sizes;
  MoeForward f;
  f.sizes = s;
  f.dtype = layer.dtype;
  f.activation = layer.activation;
  f.order = layer.order;
  f.routing = routing;
  f.x = place.rows(x, "x", layer.dtype, {s.tokens, s.hidden});
  UpWeight const up = up_weight_of(place, layer, w.up, w.gate, layer.dtype);
  f.w_up = {up.gate, up.up};
  f.w_down = down_weight_of(place, layer, w.down, layer.dtype);
  f.b_up = place.rows(b_up, "b_up", layer.dtype, {s.experts, layer.width()});
  f.b_down = place.rows(b_down, "b_down", layer.dtype, {s.experts, s.hidden});
  f.workspace = workspace.data_ptr();
  return f;
}

// Tokens and where they go.
struct Tokens {
  Tensor const &x, &ids, &scores;
  MaybeTensor const& token_offsets;
  MaybeTensor const& residual;
};

struct Forward {
  Sorted rows;
  Tensor h;
};

// Runs forward into o (T, H).
Forward run_forward(Place const& place, Tokens const& tokens, Weights const& w,
                    MaybeTensor const& b_up, MaybeTensor const& b_down, Activation activation,
                    Flags flags, bool keep, Tensor const& o) {
  auto const& [x, ids, scores, token_offsets, residual] = tokens;
  Slots const slots = slots_of(place, ids, "ids", token_offsets);
  Layer const layer = layer_of(x, slots, w.down, activation, flags);
  Sizes const& s = layer.sizes;
  require(slots.tokens == s.tokens, slots.lists() ? "token_offsets" : "ids", ": expected ",
          s.tokens, " tokens as in x, got ", slots.tokens);
  Sorted rows = sorted(place, ids, scores, s.experts, score_dtype(layer.dtype), token_offsets);
  Routing const routing{static_cast<int32_t*>(rows.offsets.data_ptr()),
                        static_cast<int32_t*>(rows.row_token.data_ptr()),
                        static_cast<int32_t*>(rows.slot_row.data_ptr()),
                        rows.row_score.data_ptr(),
                        scores.data_ptr(),
                        slots.token_offsets};
  Tensor h = place.empty({keep ? s.rows() : 0, layer.width()}, layer.dtype);
  Tensor const workspace = place.workspace(moe_forward_workspace_bytes(s, layer.dtype));
  MoeForward f = forward_args(place, layer, routing, x, w, b_up, b_down, workspace);
  f.h = {h.data_ptr(), 0};
  f.o = place.rows(o, "out", layer.dtype, {s.tokens, s.hidden});
  f.residual = place.rows(residual, "residual", layer.dtype, {s.tokens, s.hidden});
  place.run(cpu::moe_forward, cuda::moe_forward, f);
  return {rows, h};
}

struct Gradients {
  Tensor dx, dscores, dw_up, dw_gate, dw_down, db_up, db_down;
};

// Runs backward into new tensors.
Gradients run_backward(Place const& place, Layer const& layer, Routing const& routing,
                       Slots const& slots, Tensor const& dout, Tensor const& x, Tensor const& h,
                       Weights const& w, MaybeTensor const& b_down, int64_t wanted) {
  Sizes const& s = layer.sizes;
  DType const dtype = layer.dtype;
  auto const fresh = [&](int64_t bit, Shape shape) {
    return wanted & bit ? place.empty(shape, dtype) : place.empty({0}, dtype);
  };
  auto const like = [&](int64_t bit, Tensor const& weight) {
    return wanted & bit ? empty_like(weight) : place.empty({0}, dtype);
  };
  bool const combined = routing.row_token != nullptr, by_row = wanted & kRows;
  bool const fill = !combined && (wanted & kX);  // rows past offsets[E] are not written
  Gradients g{fill     ? place.zeros({s.tokens, s.hidden}, dtype)
              : by_row ? place.empty({s.rows(), s.hidden}, dtype)
                       : fresh(kX, {s.tokens, s.hidden}),
              wanted & kScores ? slots.empty(place, score_dtype(dtype))
                               : place.empty({0}, score_dtype(dtype)),
              like(kUp, w.up),
              w.gate.has_value() ? like(kUp, *w.gate) : place.empty({0}, dtype),
              like(kDown, w.down),
              fresh(kUpBias, {s.experts, layer.width()}),
              fresh(kDownBias, {s.experts, s.hidden})};
  MoeBackward b;
  b.sizes = s;
  b.dtype = b.dw_dtype = dtype;
  b.activation = layer.activation;
  b.order = layer.order;
  b.routing = routing;
  b.dout = place.rows(dout, "dout", dtype, {s.tokens, s.hidden});
  b.x = place.rows(x, "x", dtype, {s.tokens, s.hidden});
  b.h = place.rows(h, "h", dtype, {s.rows(), layer.width()});
  UpWeight const up = up_weight_of(place, layer, w.up, w.gate, dtype);
  b.w_up = {up.gate, up.up};
  b.w_down = down_weight_of(place, layer, w.down, dtype);
  b.b_down = place.rows(b_down, "b_down", dtype, {s.experts, s.hidden});
  (by_row ? b.dx_rows : b.dx) = {g.dx.data_ptr(), 0};
  b.dscores = g.dscores.data_ptr();
  if (wanted & kUp) {
    MaybeTensor const gate = w.gate.has_value() ? MaybeTensor(g.dw_gate) : std::nullopt;
    b.dw_up = up_weight_of(place, layer, g.dw_up, gate, dtype);
  }
  if (wanted & kDown) b.dw_down = down_weight_of(place, layer, g.dw_down, dtype);
  b.db_up = {g.db_up.data_ptr(), 0};
  b.db_down = {g.db_down.data_ptr(), 0};
  Tensor const workspace = place.workspace(moe_backward_workspace_bytes(
      s, dtype, layer.activation.gated, combined && (wanted & kX), wanted & (kUpBias | kDownBias)));
  b.workspace = workspace.data_ptr();
  place.run(cpu::moe_backward, cuda::moe_backward, b);
  return g;
}

}  // namespace

Tensors6 moe_forward(Tensor const& x, Tensor const& ids, Tensor const& scores,
                     MaybeTensor const& token_offsets, MaybeTensor const& residual,
                     Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                     MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                     double alpha, double limit, double up_offset, bool clamp_after,
                     bool interleaved, bool transposed, bool keep) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  Tensor o = place.empty({x.size(0), x.size(1)}, dtype_of(x, "x"));
  auto const [rows, h] =
      run_forward(place, {x, ids, scores, token_offsets, residual}, {w_up, w_gate, w_down}, b_up,
                  b_down, activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                  {interleaved, transposed}, keep, o);
  return {o, h, rows.offsets, rows.row_token, rows.slot_row, rows.row_score};
}

Tensor moe_forward_out(Tensor const& x, Tensor const& ids, Tensor const& scores,
                       MaybeTensor const& token_offsets, MaybeTensor const& residual,
                       Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                       double alpha, double limit, double up_offset, bool clamp_after,
                       bool interleaved, bool transposed, Tensor& out) {
  Place const place(x, "x");
  return run_forward(place, {x, ids, scores, token_offsets, residual}, {w_up, w_gate, w_down}, b_up,
                     b_down, activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                     {interleaved, transposed}, /*keep=*/false, out)
      .rows.offsets;
}

Tensor moe_layer_out(Tensor const& x, Tensor const& router, MaybeTensor const& selection_bias,
                     MaybeTensor const& token_mask, int64_t top_k, int64_t score, bool renormalize,
                     double scale, int64_t groups, int64_t top_groups, double sum_floor,
                     int64_t group_score, MaybeTensor const& residual, Tensor const& w_up,
                     Tensor const& w_down, MaybeTensor const& b_up, MaybeTensor const& b_down,
                     int64_t kind, bool gated, double alpha, double limit, double up_offset,
                     bool clamp_after, bool interleaved, bool transposed, Tensor& out) {
  Place const place(x, "x");
  auto const [scores, ids, slopes] =
      route(router_logits(place, x, router), selection_bias, token_mask, top_k, score, renormalize,
            scale, groups, top_groups, sum_floor, group_score);
  return run_forward(place, {x, ids, scores, std::nullopt, residual}, {w_up, std::nullopt, w_down},
                     b_up, b_down, activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                     {interleaved, transposed}, /*keep=*/false, out)
      .rows.offsets;
}

Tensors7 moe_backward(Tensor const& dout, Tensor const& x, Tensor const& h, Tensor const& offsets,
                      Tensor const& row_token, Tensor const& slot_row, Tensor const& row_score,
                      MaybeTensor const& token_offsets, Tensor const& w_up,
                      MaybeTensor const& w_gate, Tensor const& w_down, MaybeTensor const& b_down,
                      int64_t kind, bool gated, double alpha, double limit, double up_offset,
                      bool clamp_after, bool interleaved, bool transposed, int64_t wanted) {
  Place const place(x, "x");
  Slots const slots = slots_of(place, slot_row, "slot_row", token_offsets);
  Layer const layer =
      layer_of(x, slots, w_down, activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
               {interleaved, transposed});
  Sizes const& s = layer.sizes;
  Routing routing;
  routing.offsets = place.indices(offsets, "offsets", {s.experts + 1});
  routing.row_token = place.indices(row_token, "row_token", {s.rows()});
  require(slots.tokens == s.tokens, slots.lists() ? "token_offsets" : "slot_row", ": expected ",
          s.tokens, " tokens as in x, got ", slots.tokens);
  routing.slot_row = slots.indices(place, slot_row, "slot_row");
  routing.token_offsets = slots.token_offsets;
  routing.row_score = place.packed(row_score, "row_score", score_dtype(layer.dtype), {s.rows()});
  Gradients g = run_backward(place, layer, routing, slots, dout, x, h, {w_up, w_gate, w_down},
                             b_down, wanted);
  return {g.dx, g.dscores, g.dw_up, g.dw_gate, g.dw_down, g.db_up, g.db_down};
}

Tensors2 experts_forward(Tensor const& x, Tensor const& offsets, Tensor const& w_up,
                         MaybeTensor const& w_gate, Tensor const& w_down, MaybeTensor const& b_up,
                         MaybeTensor const& b_down, int64_t kind, bool gated, double alpha,
                         double limit, double up_offset, bool clamp_after, bool interleaved,
                         bool transposed, bool keep) {
  Place const place(x, "x");
  Layer const layer = layer_of(x, kSortedRows, w_down,
                               activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                               {interleaved, transposed});
  Sizes const& s = layer.sizes;
  Routing routing;
  routing.offsets = place.indices(offsets, "offsets", {s.experts + 1});
  Tensor o = place.zeros({s.tokens, s.hidden}, layer.dtype);
  Tensor h = place.empty({keep ? s.tokens : 0, layer.width()}, layer.dtype);
  Tensor const workspace = place.workspace(moe_forward_workspace_bytes(s, layer.dtype));
  MoeForward f =
      forward_args(place, layer, routing, x, {w_up, w_gate, w_down}, b_up, b_down, workspace);
  f.h = {h.data_ptr(), 0};
  f.o = {o.data_ptr(), 0};
  place.run(cpu::moe_forward, cuda::moe_forward, f);
  return {o, h};
}

Tensors6 experts_backward(Tensor const& dout, Tensor const& x, Tensor const& h,
                          Tensor const& offsets, Tensor const& w_up, MaybeTensor const& w_gate,
                          Tensor const& w_down, int64_t kind, bool gated, double alpha,
                          double limit, double up_offset, bool clamp_after, bool interleaved,
                          bool transposed, int64_t wanted) {
  Place const place(x, "x");
  Layer const layer = layer_of(x, kSortedRows, w_down,
                               activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                               {interleaved, transposed});
  Routing routing;
  routing.offsets = place.indices(offsets, "offsets", {layer.sizes.experts + 1});
  Gradients g = run_backward(place, layer, routing, kSortedRows, dout, x, h, {w_up, w_gate, w_down},
                             std::nullopt, wanted & ~int64_t(kScores));
  return {g.dx, g.dw_up, g.dw_gate, g.dw_down, g.db_up, g.db_down};
}

}  // namespace guild::binding
