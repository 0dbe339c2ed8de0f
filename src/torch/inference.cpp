// Layers without gradients. Nothing is kept, so that all that a call needs beside its result and
// its offsets lies in one buffer: at a few tokens each allocation counts.
#include "shared/workspace.h"
#include "torch/forward.h"
#include "torch/ops.h"

namespace guild::binding {

namespace {

// Parts of the buffer. ids and scores are there where the layer routes its tokens itself.
struct Scratch {
  int32_t* ids;                   // (T, K)
  void* scores;                   // (T, K)
  int32_t *row_token, *slot_row;  // (R) each
  void *sort, *products;          // work buffers
};

Scratch carve(Carver& carver, Layer const& layer, bool routes) {
  Sizes const& s = layer.sizes;
  int64_t const rows = s.rows(), routed = routes ? rows : 0;
  auto const indices = [&](int64_t count) {
    return static_cast<int32_t*>(carver.take(count, sizeof(int32_t)));
  };
  Scratch found{};
  found.ids = indices(routed);
  found.scores = carver.take(routed, element_bytes(score_dtype(layer.dtype)));
  found.row_token = indices(rows);
  found.slot_row = indices(rows);
  found.sort = carver.take(sort_workspace_bytes(rows, s.experts, 1));
  found.products = carver.take(moe_forward_workspace_bytes(s, layer.dtype));
  return found;
}

// The buffer, alive as long as the call is.
struct Buffer {
  Tensor memory;
  Scratch parts;

  Buffer(Place const& place, Layer const& layer, bool routes)
      : memory(place.workspace(bytes(layer, routes))) {
    Carver carver(memory.data_ptr());
    parts = carve(carver, layer, routes);
  }

 private:
  static int64_t bytes(Layer const& layer, bool routes) {
    Carver counting(nullptr);
    carve(counting, layer, routes);
    return counting.used();
  }
};

// A token's experts and their weights.
struct Chosen {
  void const* ids;
  bool ids_are_int64;
  void const* scores;
  int32_t const* token_offsets;
};

Chosen chosen_of(Place const& place, Layer const& layer, Slots const& slots, Tensor const& ids,
                 Tensor const& scores) {
  require(slots.tokens == layer.sizes.tokens, slots.lists() ? "token_offsets" : "ids",
          ": expected ", layer.sizes.tokens, " tokens as in x, got ", slots.tokens);
  void const* const data = slots.data(place, ids, "ids");
  require(ids.is_contiguous(), "ids: expected a contiguous tensor");
  return {data, is_int64(ids, "ids"),
          slots.packed(place, scores, "scores", score_dtype(layer.dtype)), slots.token_offsets};
}

struct Operands {
  Tensor const& x;
  MaybeTensor const& residual;
  Weights w;
  MaybeTensor const &b_up, &b_down;
};

// Runs forward into out (T, H); returns the offsets.
Tensor run(Place const& place, Layer const& layer, Operands const& given, Chosen const& chosen,
           Scratch const& scratch, Tensor const& out) {
  Sizes const& s = layer.sizes;
  Tensor offsets = place.empty_int32({s.experts + 1});
  Sort const sort{.tokens = s.tokens,
                  .experts = s.experts,
                  .top_k = s.top_k,
                  .score_dtype = score_dtype(layer.dtype),
                  .ids_are_int64 = chosen.ids_are_int64,
                  .ids = chosen.ids,
                  .offsets = static_cast<int32_t*>(offsets.data_ptr()),
                  .row_token = scratch.row_token,
                  .slot_row = scratch.slot_row,
                  .workspace = scratch.sort,
                  .slots = s.slots,
                  .token_offsets = chosen.token_offsets};
  Routing const routing{sort.offsets,          sort.row_token, sort.slot_row,
                        /*row_score=*/nullptr, chosen.scores,  chosen.token_offsets};
  MoeForward f = forward_args(place, layer, routing, given.x, given.w, given.b_up, given.b_down,
                              scratch.products);
  f.o = place.rows(out, "out", layer.dtype, {s.tokens, s.hidden});
  f.residual = place.rows(given.residual, "residual", layer.dtype, {s.tokens, s.hidden});
  f.sort = &sort;
  place.run(cpu::moe_forward, cuda::moe_forward, f);
  return offsets;
}

// The same from the router's product on.
struct Routed {
  Tensor const& weight;
  MaybeTensor const &selection_bias, &token_mask;
  int64_t top_k;
  Router router;
};

Tensor run_layer(Place const& place, Operands const& given, Routed const& by, Activation activation,
                 Flags flags, Tensor const& out) {
  Layer const layer = layer_of(given.x, {.tokens = given.x.size(0), .top_k = by.top_k},
                               given.w.down, activation, flags);
  Tensor const logits = router_logits(place, given.x, by.weight);
  Route route = route_of(place, logits, by.selection_bias, by.token_mask, by.top_k, by.router);
  require(route.experts == layer.sizes.experts, "router: expected ", layer.sizes.experts,
          " experts as in w_down, got ", route.experts);
  Buffer const buffer(place, layer, /*routes=*/true);
  route.ids = buffer.parts.ids;
  route.scores = buffer.parts.scores;
  place.run(cpu::route, cuda::route, route);
  Chosen const chosen{
      .ids = route.ids, .ids_are_int64 = false, .scores = route.scores, .token_offsets = nullptr};
  return run(place, layer, given, chosen, buffer.parts, out);
}

// ---- settings -----------------------------------------------------------------------------------

constexpr int kOfExperts = 8, kOfRouter = 8;

// What a layer is told beside its tensors: one argument of an op takes the host less time than 16.
// In the order of the ops' arguments; python/guild/layer_inference.py writes them.
class Settings {
 public:
  Settings(Tensor const& tensor, int64_t count) {
    bool const plain = tensor.is_cpu() && tensor.dim() == 1 && tensor.size(0) == count &&
                       tensor.is_contiguous() && dtype_of(tensor, "settings") == DType::float64;
    require(plain, "settings: expected a contiguous float64 CPU tensor of ", count, " numbers");
    value_ = static_cast<double const*>(tensor.data_ptr());
  }
  Activation activation() const {
    return activation_of(whole(0), flag(1), value_[2], value_[3], value_[4], flag(5));
  }
  Flags flags() const { return {flag(6), flag(7)}; }
  int64_t top_k() const { return whole(8); }
  Router router(int64_t experts) const {
    return router_of(whole(9), flag(10), value_[11], whole(12), whole(13), value_[14], whole(15),
                     experts);
  }

 private:
  int64_t whole(int i) const { return int64_t(value_[i]); }
  bool flag(int i) const { return value_[i] != 0; }

  double const* value_;
};

Tensor rows_like(Place const& place, Tensor const& x) {
  require_dims(x, "x", 2);
  return place.empty({x.size(0), x.size(1)}, dtype_of(x, "x"));
}

}  // namespace

Tensor moe_forward_out(Tensor const& x, Tensor const& ids, Tensor const& scores,
                       MaybeTensor const& token_offsets, MaybeTensor const& residual,
                       Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                       double alpha, double limit, double up_offset, bool clamp_after,
                       bool interleaved, bool transposed, Tensor& out) {
  Place const place(x, "x");
  Slots const slots = slots_of(place, ids, "ids", token_offsets);
  Layer const layer =
      layer_of(x, slots, w_down, activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
               {interleaved, transposed});
  Chosen const chosen = chosen_of(place, layer, slots, ids, scores);
  Buffer const buffer(place, layer, /*routes=*/false);
  return run(place, layer, {x, residual, {w_up, w_gate, w_down}, b_up, b_down}, chosen,
             buffer.parts, out);
}

Tensor moe_layer_out(Tensor const& x, Tensor const& router, MaybeTensor const& selection_bias,
                     MaybeTensor const& token_mask, int64_t top_k, int64_t score, bool renormalize,
                     double scale, int64_t groups, int64_t top_groups, double sum_floor,
                     int64_t group_score, MaybeTensor const& residual, Tensor const& w_up,
                     Tensor const& w_down, MaybeTensor const& b_up, MaybeTensor const& b_down,
                     int64_t kind, bool gated, double alpha, double limit, double up_offset,
                     bool clamp_after, bool interleaved, bool transposed, Tensor& out) {
  Place const place(x, "x");
  require_dims(router, "router.weight", 2);
  Routed const by{router, selection_bias, token_mask, top_k,
                  router_of(score, renormalize, scale, groups, top_groups, sum_floor, group_score,
                            router.size(0))};
  return run_layer(place, {x, residual, {w_up, std::nullopt, w_down}, b_up, b_down}, by,
                   activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                   {interleaved, transposed}, out);
}

Tensors2 infer_experts(Tensor const& x, Tensor const& ids, Tensor const& scores,
                       MaybeTensor const& residual, Tensor const& w_up, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, Tensor const& settings) {
  Place const place(x, "x");
  Settings const told(settings, kOfExperts);
  Slots const slots = slots_of(place, ids, "ids", std::nullopt);
  Layer const layer = layer_of(x, slots, w_down, told.activation(), told.flags());
  Chosen const chosen = chosen_of(place, layer, slots, ids, scores);
  Tensor const out = rows_like(place, x);
  Buffer const buffer(place, layer, /*routes=*/false);
  Tensor const offsets =
      run(place, layer, {x, residual, {w_up, std::nullopt, w_down}, b_up, b_down}, chosen,
          buffer.parts, out);
  return {out, offsets};
}

Tensors2 infer_layer(Tensor const& x, Tensor const& router, MaybeTensor const& selection_bias,
                     MaybeTensor const& residual, Tensor const& w_up, Tensor const& w_down,
                     MaybeTensor const& b_up, MaybeTensor const& b_down, Tensor const& settings) {
  Place const place(x, "x");
  Settings const told(settings, kOfExperts + kOfRouter);
  require_dims(router, "router.weight", 2);
  MaybeTensor const all;
  Routed const by{router, selection_bias, /*token_mask=*/all, told.top_k(),
                  told.router(router.size(0))};
  Tensor const out = rows_like(place, x);
  Tensor const offsets = run_layer(place, {x, residual, {w_up, std::nullopt, w_down}, b_up, b_down},
                                   by, told.activation(), told.flags(), out);
  return {out, offsets};
}

}  // namespace guild::binding
