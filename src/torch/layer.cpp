// Whole layers, forward and backward: from tokens with ids and scores, or from rows already sorted.
#include "checks/check.h"
#include "torch/backward.h"
#include "torch/forward.h"
#include "torch/ops.h"
#include "torch/overlap.h"
#include "torch/routing.h"

namespace guild::binding {

namespace {

constexpr Slots kSortedRows{.tokens = 0, .top_k = 1};  // one a row

// Tokens and where they go.
struct Tokens {
  Tensor const &x, &ids, &scores;
  MaybeTensor const& token_offsets;
  MaybeTensor const& residual;
};

struct Forward {
  Sorting rows;
  Tensor h;
};

// Runs forward into o (T, H).
Forward run_forward(Place const& place, Tokens const& tokens, Weights const& w,
                    MaybeTensor const& b_up, MaybeTensor const& b_down, Activation activation,
                    Flags flags, bool keep, Tensor const& o) {
  auto const& [x, ids, scores, token_offsets, residual] = tokens;
  Slots const slots = slots_of(place, ids, "ids", token_offsets);
  Layer const layer = layer_of(place, x, slots, w.down, activation, flags);
  Sizes const& s = layer.sizes;
  require(slots.tokens == s.tokens, slots.lists() ? "token_offsets" : "ids", ": expected ",
          s.tokens, " tokens as in x, got ", slots.tokens);
  Sorting rows = sorting(place, ids, scores, s.experts, score_dtype(layer.dtype), token_offsets);
  Sort const& sort = rows.args;
  Routing const routing{sort.offsets,   sort.row_token,    sort.slot_row,
                        sort.row_score, scores.data_ptr(), slots.token_offsets};
  Tensor h = place.empty({keep ? s.rows() : 0, layer.width()}, layer.dtype);
  Tensor const workspace = place.workspace(moe_forward_workspace_bytes(s, layer.dtype));
  MoeForward f = forward_args(place, layer, routing, x, w, b_up, b_down, workspace.data_ptr());
  f.h = {h.data_ptr(), 0};
  f.o = place.rows(o, "out", layer.dtype, {s.tokens, s.hidden});
  f.residual = place.rows(residual, "residual", layer.dtype, {s.tokens, s.hidden});
  f.sort = &sort;
  place.run(cpu::moe_forward, cuda::moe_forward, f);
  return {rows, h};
}

// Runs forward of sorted rows into o (R, H), whose rows past offsets[E] are not written.
void run_sorted(Place const& place, Layer const& layer, Routing const& routing, Tensor const& x,
                Weights const& w, MaybeTensor const& b_up, MaybeTensor const& b_down,
                Tensor const& h, Tensor const& o) {
  Sizes const& s = layer.sizes;
  Tensor const workspace = place.workspace(moe_forward_workspace_bytes(s, layer.dtype));
  MoeForward f = forward_args(place, layer, routing, x, w, b_up, b_down, workspace.data_ptr());
  f.h = {h.data_ptr(), 0};
  f.o = place.rows(o, "out", layer.dtype, {s.tokens, s.hidden});
  check(f);  // before anything is written
  clear_outside(place, o, routing.offsets, s.experts);
  place.run(cpu::moe_forward, cuda::moe_forward, f);
}

// Runs backward into new tensors.
Gradients run_backward(Place const& place, Layer const& layer, Routing const& routing,
                       Slots const& slots, Tensor const& dout, Tensor const& x, Tensor const& h,
                       Weights const& w, MaybeTensor const& b_down, int64_t wanted) {
  Tensor const dout_rows = place.aligned(dout);
  auto [g, b] = backward_call(place, layer, routing, slots, dout_rows, x, h, w, b_down, wanted,
                              layer.sizes.rows());
  bool const combined = routing.row_token != nullptr;
  Tensor const workspace = place.workspace(
      moe_backward_workspace_bytes(layer.sizes, layer.dtype, layer.activation.gated,
                                   combined && (wanted & kX), wanted & (kUpBias | kDownBias)));
  b.workspace = workspace.data_ptr();
  place.run(cpu::moe_backward, cuda::moe_backward, b);
  return g;
}

// residual (T, H) -> o (T, H), h (R, W) or empty, offsets, row_token, slot_row, row_score
Tensors6 moe_forward(Tensor const& x, Tensor const& ids, Tensor const& scores,
                     MaybeTensor const& token_offsets, MaybeTensor const& residual,
                     Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                     MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                     double alpha, double limit, double up_offset, bool clamp_after,
                     bool interleaved, bool transposed, bool keep, MaybeTensor const& experts_at) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  Tensor o = place.empty({x.size(0), x.size(1)}, dtype_of(x, "x"));
  auto const [rows, h] =
      run_forward(place, {x, ids, scores, token_offsets, residual}, {w_up, w_gate, w_down}, b_up,
                  b_down, activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                  {interleaved, transposed, experts_at}, keep, o);
  return {o, h, rows.offsets, rows.row_token, rows.slot_row, rows.row_score};
}

// -> dx, dscores, dw_up, dw_gate, dw_down, db_up, db_down; wanted: bits of Wanted
Tensors7 moe_backward(Tensor const& dout, Tensor const& x, Tensor const& h, Tensor const& offsets,
                      Tensor const& row_token, Tensor const& slot_row, Tensor const& row_score,
                      MaybeTensor const& token_offsets, Tensor const& w_up,
                      MaybeTensor const& w_gate, Tensor const& w_down, MaybeTensor const& b_down,
                      int64_t kind, bool gated, double alpha, double limit, double up_offset,
                      bool clamp_after, bool interleaved, bool transposed, int64_t wanted,
                      MaybeTensor const& experts_at) {
  Place const place(x, "x");
  Slots const slots = slots_of(place, slot_row, "slot_row", token_offsets);
  Layer const layer = layer_of(place, x, slots, w_down,
                               activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                               {interleaved, transposed, experts_at});
  Routing const routing =
      backward_routing(place, layer, slots, offsets, row_token, slot_row, row_score);
  Gradients g = run_backward(place, layer, routing, slots, dout, x, h, {w_up, w_gate, w_down},
                             b_down, wanted);
  return {g.dx, g.dscores, g.dw_up, g.dw_gate, g.dw_down, g.db_up, g.db_down};
}

// Rows already sorted: x (R, H) -> o (R, H), zero past offsets[E], and h.
Tensors2 experts_forward(Tensor const& x, Tensor const& offsets, Tensor const& w_up,
                         MaybeTensor const& w_gate, Tensor const& w_down, MaybeTensor const& b_up,
                         MaybeTensor const& b_down, int64_t kind, bool gated, double alpha,
                         double limit, double up_offset, bool clamp_after, bool interleaved,
                         bool transposed, bool keep, MaybeTensor const& experts_at) {
  Place const place(x, "x");
  Layer const layer = layer_of(place, x, kSortedRows, w_down,
                               activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                               {interleaved, transposed, experts_at});
  Sizes const& s = layer.sizes;
  Routing const routing = routing_of(place, s, offsets);
  Tensor o = place.empty({s.tokens, s.hidden}, layer.dtype);
  Tensor h = place.empty({keep ? layer.sizes.tokens : 0, layer.width()}, layer.dtype);
  run_sorted(place, layer, routing, x, {w_up, w_gate, w_down}, b_up, b_down, h, o);
  return {o, h};
}

// The same into out (R, H), keeping nothing.
void experts_forward_out(Tensor const& x, Tensor const& offsets, Tensor const& w_up,
                         MaybeTensor const& w_gate, Tensor const& w_down, MaybeTensor const& b_up,
                         MaybeTensor const& b_down, int64_t kind, bool gated, double alpha,
                         double limit, double up_offset, bool clamp_after, bool interleaved,
                         bool transposed, Tensor& out, MaybeTensor const& experts_at) {
  Place const place(x, "x");
  Layer const layer = layer_of(place, x, kSortedRows, w_down,
                               activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                               {interleaved, transposed, experts_at});
  Sizes const& s = layer.sizes;
  place.rows(out, "out", layer.dtype, {s.tokens, s.hidden});
  Routing const routing = routing_of(place, s, offsets);
  require_apart({{"out", out}}, {{"x", x},
                                 {"offsets", offsets},
                                 {"w_up", own_memory(w_up, experts_at)},
                                 {"w_gate", own_memory(w_gate, experts_at)},
                                 {"w_down", own_memory(w_down, experts_at)},
                                 {"b_up", b_up},
                                 {"b_down", b_down},
                                 {"experts_at", experts_at}});
  Tensor const nothing = place.empty({0, layer.width()}, layer.dtype);
  run_sorted(place, layer, routing, x, {w_up, w_gate, w_down}, b_up, b_down, nothing, out);
}

// -> dx (zero past offsets[E]), dw_up, dw_gate, dw_down, db_up, db_down
Tensors6 experts_backward(Tensor const& dout, Tensor const& x, Tensor const& h,
                          Tensor const& offsets, Tensor const& w_up, MaybeTensor const& w_gate,
                          Tensor const& w_down, int64_t kind, bool gated, double alpha,
                          double limit, double up_offset, bool clamp_after, bool interleaved,
                          bool transposed, int64_t wanted, MaybeTensor const& experts_at) {
  Place const place(x, "x");
  Layer const layer = layer_of(place, x, kSortedRows, w_down,
                               activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                               {interleaved, transposed, experts_at});
  Routing const routing = routing_of(place, layer.sizes, offsets);
  require(!(wanted & kRows), "wanted: expected dx, which is by row, got ", wanted);
  Gradients g = run_backward(place, layer, routing, kSortedRows, dout, x, h, {w_up, w_gate, w_down},
                             std::nullopt, wanted & ~int64_t(kScores));
  return {g.dx, g.dw_up, g.dw_gate, g.dw_down, g.db_up, g.db_down};
}

// Backward without the weights' gradients, of tokens or, without row_token, slot_row and row_score,
// of sorted rows -> dx, dscores, and the operands of the weights' gradients: dh (R, W), a_scaled
// (R, I). db_up (E, W) and db_down (E, H), of one type, are written, or added to.
Tensors4 data_gradients(Tensor const& dout, Tensor const& h, Tensor const& offsets,
                        MaybeTensor const& row_token, MaybeTensor const& slot_row,
                        MaybeTensor const& row_score, MaybeTensor const& token_offsets,
                        Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                        MaybeTensor const& b_down, int64_t kind, bool gated, double alpha,
                        double limit, double up_offset, bool clamp_after, bool interleaved,
                        bool transposed, int64_t wanted, MaybeTensor& db_up, MaybeTensor& db_down,
                        bool accumulate, MaybeTensor const& experts_at) {
  Place const place(dout, "dout");
  bool const combined = row_token.has_value();
  require(combined == slot_row.has_value() && combined == row_score.has_value(),
          "row_token, slot_row, row_score: expected all three or none");
  require((wanted & ~int64_t(kX | kScores | kRows)) == 0,
          "wanted: expected only dx and dscores, got ", wanted);
  require(combined || !(wanted & (kScores | kRows)),
          "wanted: expected only dx for sorted rows, got ", wanted);
  Slots const slots =
      combined ? slots_of(place, *slot_row, "slot_row", token_offsets) : kSortedRows;
  Layer const layer = layer_of(place, dout, slots, w_down,
                               activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                               {interleaved, transposed, experts_at});
  Sizes const& s = layer.sizes;
  Routing const routing =
      combined ? backward_routing(place, layer, slots, offsets, *row_token, *slot_row, *row_score)
               : routing_of(place, s, offsets);
  Tensor dx = dx_of(place, layer, routing, wanted);
  Tensor dscores = dscores_of(place, layer, slots, wanted);
  Tensor dh = place.empty({s.rows(), layer.width()}, layer.dtype);
  Tensor a_scaled = place.empty({s.rows(), s.intermediate}, layer.dtype);
  Tensor const dout_rows = place.aligned(dout);
  MoeBackward b = backward_args(place, layer, routing, dout_rows, h, {w_up, w_gate, w_down}, b_down,
                                layer.sizes.rows());
  (wanted & kRows ? b.dx_rows : b.dx) = {dx.data_ptr(), 0};
  b.dscores = dscores.data_ptr();
  b.dh = {dh.data_ptr(), 0};
  b.a_scaled = {a_scaled.data_ptr(), 0};
  b.accumulate = accumulate;
  bool const biases = set_bias_targets(place, layer, db_up, db_down, b, b.dw_dtype);
  if (biases) {
    require_apart({{"db_up", db_up}, {"db_down", db_down}},
                  {{"dout", dout},
                   {"h", h},
                   {"offsets", offsets},
                   {"row_token", row_token},
                   {"slot_row", slot_row},
                   {"row_score", row_score},
                   {"token_offsets", token_offsets},
                   {"w_up", own_memory(w_up, experts_at)},
                   {"w_gate", own_memory(w_gate, experts_at)},
                   {"w_down", own_memory(w_down, experts_at)},
                   {"b_down", b_down},
                   {"experts_at", experts_at}});
  }
  Tensor const workspace = place.workspace(moe_backward_workspace_bytes(
      s, layer.dtype, gated, combined && (wanted & kX), biases, /*keeps=*/true));
  b.workspace = workspace.data_ptr();
  place.run(cpu::moe_backward, cuda::moe_backward, b);
  return {dx, dscores, dh, a_scaled};
}

}  // namespace

void define_layer(Library& m) {
  m.def(
      "moe_forward(Tensor x, Tensor ids, Tensor scores, Tensor? token_offsets, Tensor? residual, "
      "Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, bool keep" GUILD_LISTS
      ") -> (Tensor o, Tensor h, Tensor offsets, "
      "Tensor row_token, Tensor slot_row, Tensor row_score)");
  m.def(
      "moe_backward(Tensor dout, Tensor x, Tensor h, Tensor offsets, Tensor row_token, Tensor "
      "slot_row, Tensor row_score, Tensor? token_offsets, Tensor w_up, Tensor? w_gate, Tensor "
      "w_down, Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int wanted" GUILD_LISTS
      ") -> (Tensor dx, Tensor dscores, Tensor "
      "dw_up, Tensor dw_gate, Tensor dw_down, Tensor db_up, Tensor db_down)");
  m.def(
      "experts_forward(Tensor x, Tensor offsets, Tensor w_up, Tensor? w_gate, Tensor w_down, "
      "Tensor? b_up, Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, bool keep" GUILD_LISTS ") -> (Tensor o, Tensor h)");
  m.def(
      "experts_forward_out(Tensor x, Tensor offsets, Tensor w_up, Tensor? w_gate, Tensor w_down, "
      "Tensor? b_up, Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, Tensor(a!) out" GUILD_LISTS ") -> ()");
  m.def(
      "experts_backward(Tensor dout, Tensor x, Tensor h, Tensor offsets, Tensor w_up, Tensor? "
      "w_gate, Tensor w_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int wanted" GUILD_LISTS
      ") -> (Tensor dx, Tensor dw_up, Tensor "
      "dw_gate, Tensor dw_down, Tensor db_up, Tensor db_down)");
  m.def(
      "data_gradients(Tensor dout, Tensor h, Tensor offsets, Tensor? row_token, Tensor? slot_row, "
      "Tensor? row_score, Tensor? token_offsets, Tensor w_up, Tensor? w_gate, Tensor w_down, "
      "Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int wanted, Tensor(a!)? db_up=None, Tensor(b!)? "
      "db_down=None, bool accumulate=False" GUILD_LISTS
      ") -> (Tensor dx, Tensor dscores, Tensor dh, Tensor "
      "a_scaled)");
}

void implement_layer(Library& m) {
  m.impl("moe_forward", TORCH_BOX(&moe_forward));
  m.impl("moe_backward", TORCH_BOX(&moe_backward));
  m.impl("experts_forward", TORCH_BOX(&experts_forward));
  m.impl("experts_forward_out", TORCH_BOX(&experts_forward_out));
  m.impl("experts_backward", TORCH_BOX(&experts_backward));
  m.impl("data_gradients", TORCH_BOX(&data_gradients));
}

}  // namespace guild::binding
