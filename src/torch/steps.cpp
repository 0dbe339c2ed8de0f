// The steps of a layer as ops of their own, for callers that put the layer together themselves.
//
// As in the core, rows at or past offsets[E] of an output are not written.
#include "torch/backward.h"
#include "torch/ops.h"
#include "torch/overlap.h"

// A low-rank term of a step's product, in its schema: both or none.
#define GUILD_LOW_RANK ", Tensor? low_rank_t=None, Tensor? low_rank_b=None"

namespace guild::binding {

namespace {

// Sizes of a step on `rows` rows, gathered from `tokens` rows or the same ones.
Sizes sizes_of(Tensor const& w, bool transposed, int64_t tokens, int64_t rows, bool down) {
  require_dims(w, down ? "w_down" : "w_up", 3);
  Sizes s;
  s.tokens = tokens;
  s.slots = rows;
  s.experts = w.size(0);
  (down == transposed ? s.intermediate : s.hidden) = w.size(1);
  (down == transposed ? s.hidden : s.intermediate) = w.size(2);
  return s;
}

// The steps' experts_at; w: one of the weights.
int32_t const* lists_of(Place const& place, MaybeTensor const& experts_at, Tensor const& w) {
  return place.lists(experts_at, "experts_at", Layer::kLists, w.size(0));
}

int64_t rows_of(MaybeTensor const& row_token, Tensor const& by_row) {
  return row_token.has_value() ? length_of(*row_token, "row_token") : by_row.size(0);
}

// The width I of a layer from a weight whose out dimension is W, or I where gate and up are apart.
int64_t half_of(int64_t out, bool packed_pair, char const* name) {
  require(!packed_pair || out % 2 == 0, name,
          ": expected an even number of rows (gate and up), got ", out);
  return packed_pair ? out / 2 : out;
}

// The rank of a term, 0 without one.
int64_t rank_of(MaybeTensor const& t, MaybeTensor const& b) {
  require(t.has_value() == b.has_value(), t.has_value() ? "low_rank_b" : "low_rank_t",
          ": expected a tensor with ", t.has_value() ? "low_rank_t" : "low_rank_b", ", got none");
  if (!t.has_value()) return 0;
  require_dims(*t, "low_rank_t", 2);
  require(t->size(1) > 0, "low_rank_t: expected a rank of at least 1, got 0");
  return t->size(1);
}

// The term of a product with `out` columns.
LowRankTerm<ConstWeight> term_of(Place const& place, Sizes const& s, DType dtype, int64_t out,
                                 MaybeTensor const& t, MaybeTensor const& b) {
  int64_t const rank = rank_of(t, b);
  if (rank == 0) return {};
  return {place.rows(*t, "low_rank_t", dtype, {s.rows(), rank}),
          place.weight(*b, "low_rank_b", dtype, {s.experts, out, rank}, false), rank};
}

// The up projection's, of gate and up.
LowRankTerm<ConstUpWeight> term_of(Place const& place, Layer layer, MaybeTensor const& t,
                                   MaybeTensor const& b) {
  auto const both = term_of(place, layer.sizes, layer.dtype, layer.width(), t, b);
  if (both.rank == 0) return {};
  layer.sizes.hidden = both.rank;
  layer.transposed = false;
  layer.experts_at = nullptr;  // for the weights only
  return {both.t, as_const(up_weight_of(place, layer, *b, std::nullopt, layer.dtype)), both.rank};
}

// low_rank_t (R, rank) and low_rank_b (E, out, rank), both or none: a term of the product, whose
// columns are out; here and below.
//
// -> a (R, I), h (R, W) or empty
Tensors2 up_projection(Tensor const& x, Tensor const& offsets, MaybeTensor const& row_token,
                       Tensor const& w_up, MaybeTensor const& w_gate, MaybeTensor const& b_up,
                       int64_t kind, bool gated, double alpha, double limit, double up_offset,
                       bool clamp_after, bool interleaved, bool transposed, bool keep,
                       MaybeTensor const& low_rank_t, MaybeTensor const& low_rank_b,
                       MaybeTensor const& experts_at) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  int64_t const rows = rows_of(row_token, x);
  Layer layer{sizes_of(w_up, transposed, x.size(0), rows, false),
              dtype_of(x, "x"),
              activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
              order_of(interleaved),
              transposed,
              lists_of(place, experts_at, w_up)};
  Sizes& s = layer.sizes;
  s.intermediate = half_of(s.intermediate, gated && !w_gate.has_value(), "w_up");
  UpProjection args;
  args.sizes = s;
  args.dtype = layer.dtype;
  args.activation = layer.activation;
  args.order = layer.order;
  args.routing = routing_of(place, s, offsets, row_token);
  args.x = place.rows(x, "x", layer.dtype, {s.tokens, s.hidden});
  args.w_up = as_const(up_weight_of(place, layer, w_up, w_gate, layer.dtype));
  args.bias = place.rows(b_up, "b_up", layer.dtype, {s.experts, layer.width()});
  args.low_rank = term_of(place, layer, low_rank_t, low_rank_b);
  Tensor a = place.empty({rows, s.intermediate}, layer.dtype);
  Tensor h = place.empty({keep ? rows : 0, layer.width()}, layer.dtype);
  args.a = {a.data_ptr(), 0};
  args.h = {h.data_ptr(), 0};
  place.run_product(cpu::up_projection, cuda::up_projection, args);
  return {a, h};
}

Tensor down_projection(Tensor const& a, Tensor const& offsets, Tensor const& w_down,
                       MaybeTensor const& b_down, bool transposed, MaybeTensor const& low_rank_t,
                       MaybeTensor const& low_rank_b, MaybeTensor const& experts_at) {
  Place const place(a, "a");
  require_dims(a, "a", 2);
  Layer const layer{sizes_of(w_down, transposed, a.size(0), a.size(0), true),
                    dtype_of(a, "a"),
                    {},
                    GateUp::concatenated,
                    transposed,
                    lists_of(place, experts_at, w_down)};
  Sizes const& s = layer.sizes;
  DownProjection args;
  args.sizes = s;
  args.dtype = layer.dtype;
  args.routing = routing_of(place, s, offsets);
  args.a = place.rows(a, "a", layer.dtype, {s.rows(), s.intermediate});
  args.w_down = down_weight_of(place, layer, w_down, layer.dtype);
  args.bias = place.rows(b_down, "b_down", layer.dtype, {s.experts, s.hidden});
  args.low_rank = term_of(place, s, layer.dtype, s.hidden, low_rank_t, low_rank_b);
  Tensor y = place.empty({s.rows(), s.hidden}, layer.dtype);
  args.y = {y.data_ptr(), 0};
  place.run_product(cpu::down_projection, cuda::down_projection, args);
  return y;
}

// y (R, H), slot_row (T, K), residual (T, H) -> (T, H). dlogits (T, E), ids (T, K) and router (E,
// H) for the router's part of a gradient: all three or none.
Tensor combine(Tensor const& y, Tensor const& slot_row, MaybeTensor const& slot_score,
               MaybeTensor const& token_offsets, MaybeTensor const& residual,
               MaybeTensor const& dlogits, MaybeTensor const& ids, MaybeTensor const& router) {
  Place const place(y, "y");
  require_dims(y, "y", 2);
  Slots const slots = slots_of(place, slot_row, "slot_row", token_offsets);
  Combine args;
  Sizes& s = args.sizes;
  s = {.tokens = slots.tokens,
       .hidden = y.size(1),
       .intermediate = 1,
       .experts = 1,
       .top_k = slots.top_k,
       .slots = slots.count};
  args.dtype = dtype_of(y, "y");
  args.routing.token_offsets = slots.token_offsets;
  args.routing.slot_row = slots.indices(place, slot_row, "slot_row");
  if (slot_score.has_value()) {
    args.routing.slot_score =
        slots.packed(place, *slot_score, "slot_score", score_dtype(args.dtype));
  }
  args.y = place.rows(y, "y", args.dtype, {s.rows(), s.hidden});
  args.residual = place.rows(residual, "residual", args.dtype, {s.tokens, s.hidden});
  MaybeTensor router_rows;
  if (router.has_value()) {
    require_dims(*router, "router", 2);
    s.experts = router->size(0);
    router_rows = place.aligned(*router);
    args.router.weight = place.rows(router_rows, "router", args.dtype, {s.experts, s.hidden});
    require(dlogits.has_value() && ids.has_value(), dlogits.has_value() ? "ids" : "dlogits",
            ": expected a tensor with router, got none");
    args.router.dlogits = place.rows(*dlogits, "dlogits", args.dtype, {s.tokens, s.experts});
    args.router.ids = slots.indices(place, *ids, "ids");
  } else {
    require(!dlogits.has_value() && !ids.has_value(), dlogits.has_value() ? "dlogits" : "ids",
            ": expected none without router, got a tensor");
  }
  Tensor o = place.empty({s.tokens, s.hidden}, args.dtype);
  args.o = {o.data_ptr(), 0};
  place.run(cpu::combine, cuda::combine, args);
  return o;
}

// -> dh (R, W), a_scaled (R, I), score_parts (R, parts); db_up (E, W) and db_down (E, H), of one
// type, are written, or added to
Tensors3 down_gradient(Tensor const& dout, Tensor const& h, Tensor const& offsets,
                       MaybeTensor const& row_token, MaybeTensor const& row_score,
                       Tensor const& w_down, int64_t kind, bool gated, double alpha, double limit,
                       double up_offset, bool clamp_after, bool interleaved, bool transposed,
                       MaybeTensor& db_up, MaybeTensor& db_down, bool accumulate,
                       MaybeTensor const& low_rank_t, MaybeTensor const& low_rank_b,
                       MaybeTensor const& experts_at) {
  Place const place(dout, "dout");
  require_dims(dout, "dout", 2);
  require_dims(h, "h", 2);
  Layer const layer{sizes_of(w_down, transposed, dout.size(0), h.size(0), true),
                    dtype_of(dout, "dout"),
                    activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                    order_of(interleaved),
                    transposed,
                    lists_of(place, experts_at, w_down)};
  Sizes const& s = layer.sizes;
  DownGradient args;
  args.sizes = s;
  args.dtype = layer.dtype;
  args.activation = layer.activation;
  args.order = layer.order;
  args.routing = routing_of(place, s, offsets, row_token, row_score, score_dtype(layer.dtype));
  Tensor const dout_rows = place.aligned(dout);
  args.dout = place.rows(dout_rows, "dout", layer.dtype,
                         {row_token.has_value() ? s.tokens : s.rows(), s.hidden});
  args.w_down = down_weight_of(place, layer, w_down, layer.dtype);
  args.h = place.rows(h, "h", layer.dtype, {s.rows(), layer.width()});
  args.low_rank = term_of(place, s, layer.dtype, s.intermediate, low_rank_t, low_rank_b);
  Shape const of_dh{s.rows(), layer.width()};
  Tensor dh = row_token.has_value()
                  ? place.empty(of_dh, layer.dtype)
                  : sorted_rows(place, of_dh, layer.dtype, args.routing.offsets, s.experts);
  Tensor a_scaled = place.empty({s.rows(), s.intermediate}, layer.dtype);
  Tensor parts = place.empty({s.rows(), score_parts(s)}, score_dtype(layer.dtype));
  args.dh = {dh.data_ptr(), 0};
  args.a_scaled = {a_scaled.data_ptr(), 0};
  args.score_parts = parts.data_ptr();
  bool const biases = set_bias_targets(place, layer, db_up, db_down, args, args.db_dtype);
  Tensor const workspace =
      place.workspace(biases ? down_gradient_workspace_bytes(s, layer.activation.gated) : 0);
  args.accumulate = accumulate;
  args.workspace = workspace.data_ptr();
  require_apart({{"db_up", db_up}, {"db_down", db_down}},
                {{"dout", dout},
                 {"h", h},
                 {"offsets", offsets},
                 {"row_token", row_token},
                 {"row_score", row_score},
                 {"w_down", own_memory(w_down, experts_at)},
                 {"low_rank_t", low_rank_t},
                 {"low_rank_b", low_rank_b},
                 {"experts_at", experts_at}});
  place.run_product(cpu::down_gradient, cuda::down_gradient, args);
  return {dh, a_scaled, parts};
}

// -> dscores (T, K)
Tensor score_gradient(Tensor const& parts, Tensor const& slot_row, Tensor const& offsets,
                      Tensor const& dout, MaybeTensor const& b_down, int64_t intermediate,
                      MaybeTensor const& token_offsets) {
  Place const place(dout, "dout");
  require_dims(dout, "dout", 2);
  Slots const slots = slots_of(place, slot_row, "slot_row", token_offsets);
  require(slots.tokens == dout.size(0), "slot_row: expected ", dout.size(0),
          " tokens as in dout, got ", slots.tokens);
  require_dims(offsets, "offsets", 1);
  ScoreGradient args;
  Sizes& s = args.sizes;
  s = {.tokens = dout.size(0),
       .hidden = dout.size(1),
       .intermediate = intermediate,
       .experts = offsets.size(0) - 1,
       .top_k = slots.top_k,
       .slots = slots.count};
  args.dtype = dtype_of(dout, "dout");
  args.routing = routing_of(place, s, offsets);
  args.routing.token_offsets = slots.token_offsets;
  args.routing.slot_row = slots.indices(place, slot_row, "slot_row");
  DType const scores = score_dtype(args.dtype);
  args.score_parts = place.packed(parts, "score_parts", scores, {s.rows(), score_parts(s)});
  Tensor const dout_rows = place.aligned(dout);
  args.dout = place.rows(dout_rows, "dout", args.dtype, {s.tokens, s.hidden});
  args.bias = place.rows(b_down, "b_down", args.dtype, {s.experts, s.hidden});
  Tensor dscores = slots.empty(place, scores);
  args.dscores = dscores.data_ptr();
  place.run(cpu::score_gradient, cuda::score_gradient, args);
  return dscores;
}

Tensor up_gradient(Tensor const& dh, Tensor const& offsets, Tensor const& w_up,
                   MaybeTensor const& w_gate, bool gated, bool interleaved, bool transposed,
                   MaybeTensor const& low_rank_t, MaybeTensor const& low_rank_b,
                   MaybeTensor const& experts_at) {
  Place const place(dh, "dh");
  require_dims(dh, "dh", 2);
  Activation activation;
  activation.gated = gated;
  Layer layer{sizes_of(w_up, transposed, dh.size(0), dh.size(0), false),
              dtype_of(dh, "dh"),
              activation,
              order_of(interleaved),
              transposed,
              lists_of(place, experts_at, w_up)};
  Sizes& s = layer.sizes;
  s.intermediate = half_of(s.intermediate, gated && !w_gate.has_value(), "w_up");
  UpGradient args;
  args.sizes = s;
  args.dtype = layer.dtype;
  args.gated = gated;
  args.order = layer.order;
  args.routing = routing_of(place, s, offsets);
  args.dh = place.rows(dh, "dh", layer.dtype, {s.rows(), layer.width()});
  args.w_up = as_const(up_weight_of(place, layer, w_up, w_gate, layer.dtype));
  args.low_rank = term_of(place, s, layer.dtype, s.hidden, low_rank_t, low_rank_b);
  Tensor dx = place.empty({s.rows(), s.hidden}, layer.dtype);
  args.dx = {dx.data_ptr(), 0};
  place.run_product(cpu::up_gradient, cuda::up_gradient, args);
  return dx;
}

}  // namespace

void define_steps(Library& m) {
  m.def(
      "up_projection(Tensor x, Tensor offsets, Tensor? row_token, Tensor w_up, Tensor? w_gate, "
      "Tensor? b_up, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, bool keep" GUILD_LOW_RANK GUILD_LISTS
      ") -> (Tensor a, Tensor h)");
  m.def(
      "down_projection(Tensor a, Tensor offsets, Tensor w_down, Tensor? b_down, bool "
      "transposed" GUILD_LOW_RANK GUILD_LISTS ") -> Tensor");
  m.def(
      "combine(Tensor y, Tensor slot_row, Tensor? slot_score, Tensor? token_offsets=None, Tensor? "
      "residual=None, Tensor? dlogits=None, Tensor? ids=None, Tensor? router=None) -> Tensor");
  m.def(
      "down_gradient(Tensor dout, Tensor h, Tensor offsets, Tensor? row_token, Tensor? row_score, "
      "Tensor w_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, Tensor(a!)? db_up=None, Tensor(b!)? db_down=None, "
      "bool accumulate=False" GUILD_LOW_RANK GUILD_LISTS
      ") -> (Tensor dh, Tensor a_scaled, Tensor score_parts)");
  m.def(
      "score_gradient(Tensor score_parts, Tensor slot_row, Tensor offsets, Tensor dout, Tensor? "
      "b_down, int intermediate, Tensor? token_offsets=None) -> Tensor");
  m.def(
      "up_gradient(Tensor dh, Tensor offsets, Tensor w_up, Tensor? w_gate, bool gated, bool "
      "interleaved, bool transposed" GUILD_LOW_RANK GUILD_LISTS ") -> Tensor");
}

void implement_steps(Library& m) {
  m.impl("up_projection", TORCH_BOX(&up_projection));
  m.impl("down_projection", TORCH_BOX(&down_projection));
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("down_gradient", TORCH_BOX(&down_gradient));
  m.impl("score_gradient", TORCH_BOX(&score_gradient));
  m.impl("up_gradient", TORCH_BOX(&up_gradient));
}

}  // namespace guild::binding
