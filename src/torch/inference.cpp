// Layers without gradients. Nothing is kept for backward, so everything that a call needs besides
// its result and its offsets is in one buffer: for few tokens each allocation counts.
#include "cuda/rows/all_rows.h"
#include "cuda/shared_expert.h"
#include "torch/forward.h"
#include "torch/inference_buffer.h"
#include "torch/ops.h"
#include "torch/overlap.h"
#include "torch/routing.h"
#include "torch/settings.h"

namespace guild::binding {

namespace {

// Experts that every token goes through, as a single expert of all rows.
struct Shared {
  Tensor const &w_up, &w_down;  // (W, H) or with a gate (2 W, H); (H, W)
  MaybeTensor const& scale;     // (T, 1) scores: what their results are multiplied by
  MaybeTensor const& gate;      // (1, H): what the scale follows from; at most one of the two
};

Layer shared_layer(Layer layer, Shared const& shared) {
  require_dims(shared.w_down, "shared.w_down", 2);
  layer.sizes.intermediate = shared.w_down.size(1);
  layer.sizes.experts = layer.sizes.top_k = 1;
  layer.transposed = false;
  return layer;
}

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
  void const* residual_scale = nullptr;
  cuda::SharedExpert const* riding = nullptr;  // fused into the layer's launches; null: none
  cuda::LayerRouter const* router = nullptr;   // null: the router has already run
};

// Runs forward into out (T, H); returns the offsets.
Tensor run(Place const& place, Layer const& layer, Operands const& given, Chosen const& chosen,
           Buffer const& buffer, Tensor const& out) {
  Sizes const& s = layer.sizes;
  Scratch const& scratch = buffer.parts;
  Tensor offsets = offsets_in(place, buffer, layer);
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
  Rows const shared{scratch.shared_rows, 0};
  f.residual = shared.data != nullptr
                   ? shared
                   : place.rows(given.residual, "residual", layer.dtype, {s.tokens, s.hidden});
  f.residual_scale = given.residual_scale;
  f.sort = &sort;
  if (given.riding != nullptr) f.residual = {};
  if (given.router != nullptr) {
    cuda::moe_forward(f, *given.router, given.riding, place.queue());
  } else if (given.riding != nullptr) {
    cuda::moe_forward(f, *given.riding, place.queue());
  } else {
    place.run<MoeForward>(cpu::moe_forward, cuda::moe_forward, f);
  }
  return offsets;
}

cuda::SharedExpert shared_expert(Place const& place, Layer const& layer, Shared const& shared,
                                 void* o) {
  Sizes const& s = layer.sizes;
  void* const up = place.packed(shared.w_up, "shared.w_up", layer.dtype, {layer.width(), s.hidden});
  void* const down =
      place.packed(shared.w_down, "shared.w_down", layer.dtype, {s.hidden, s.intermediate});
  return {.intermediate = s.intermediate,
          .w_up = up_weight<ConstWeight>(up, s, layer.activation.gated, layer.order,
                                         /*transposed=*/false, element_bytes(layer.dtype)),
          .w_down = {down, s.hidden * s.intermediate, s.intermediate, 1},
          .o = o};
}

// Runs shared experts into o (T, H).
void run_shared(Place const& place, Layer const& layer, Tensor const& x, Shared const& shared,
                SharedScratch const& scratch, void* o) {
  Sizes const& s = layer.sizes;
  cuda::AllRows const all{s.tokens, scratch.offsets};
  place.run<cuda::AllRows>(
      [](cuda::AllRows const& args) { args.offsets[0] = 0, args.offsets[1] = int32_t(args.rows); },
      cuda::all_rows, all);
  MoeForward f;
  f.sizes = s;
  f.dtype = layer.dtype;
  f.activation = layer.activation;
  f.order = layer.order;
  f.routing.offsets = scratch.offsets;
  f.x = place.rows(x, "x", layer.dtype, {s.tokens, s.hidden});
  cuda::SharedExpert const expert = shared_expert(place, layer, shared, o);
  f.w_up = expert.w_up;
  f.w_down = expert.w_down;
  f.workspace = scratch.products;
  f.o = {o, 0};
  place.run(cpu::moe_forward, cuda::moe_forward, f);
}

// The router of a layer: its weight, what masks or biases the choice, and its options.
struct RoutedBy {
  Tensor const& weight;
  MaybeTensor const &bias, &selection_bias, &token_mask;
  int64_t top_k;
  RouterScalars router;
};

// Whether a weight (E, out, in) is contiguous along its last dimension, as shared experts' are.
bool has_rows(Tensor const& weight) { return weight.size(2) == 1 || weight.stride(2) == 1; }

// Router, shared experts and experts into out (T, H); returns the offsets.
Tensor run_layer(Place const& place, Operands given, RoutedBy const& by, Activation activation,
                 Flags flags, std::optional<Shared> const& shared, Tensor const& out) {
  Layer const layer = layer_of(place, given.x, {.tokens = given.x.size(0), .top_k = by.top_k},
                               given.w.down, activation, flags);
  RouterProduct product(place, given.x, by.weight, by.bias);
  RouteSizes const sizes = product.sizes(by.top_k);
  Route route = route_of(place, sizes, by.selection_bias, by.token_mask, by.router);
  require(sizes.experts == layer.sizes.experts, "router: expected ", layer.sizes.experts,
          " experts as in w_down, got ", sizes.experts);
  std::optional<Layer> dense;
  if (shared.has_value()) dense = shared_layer(layer, *shared);
  bool const rides = dense && place.on_cuda() && !layer.transposed && has_rows(given.w.up) &&
                     has_rows(given.w.down) && cuda::fuses_shared_experts(layer.sizes);
  std::optional<RouterProduct> gate;
  if (shared && shared->gate)
    gate.emplace(place, given.x, *shared->gate, std::nullopt, "shared_gate");
  Buffer const buffer(place, layer,
                      {.routes = true,
                       .router_bytes = product.workspace_bytes(),
                       .shared = dense ? &*dense : nullptr,
                       .rides = rides,
                       .gated = gate.has_value(),
                       .gate_bytes = gate ? gate->workspace_bytes() : 0});
  cuda::SharedExpert riding;
  if (rides) {
    riding = shared_expert(place, *dense, *shared, buffer.parts.shared_rows);
    given.riding = &riding;
  } else if (dense) {
    run_shared(place, *dense, given.x, *shared, buffer.parts.shared, buffer.parts.shared_rows);
  }
  if (dense && shared->scale.has_value()) {
    given.residual_scale = place.packed(*shared->scale, "shared_scale", score_dtype(layer.dtype),
                                        {layer.sizes.tokens, 1});
  }
  if (gate) {
    product.add_gate(*gate, buffer.parts.shared_scale, buffer.parts.gate);
    given.residual_scale = buffer.parts.shared_scale;
  }
  route.ids = buffer.parts.ids;
  route.scores = buffer.parts.scores;
  std::optional<cuda::LayerRouter> router;
  if (auto const* const args = product.args(place, buffer.parts.router)) {
    given.router = &router.emplace(cuda::LayerRouter{*args, route});
  } else {
    product.route(place, route, buffer.parts.router);
  }
  Chosen const chosen{
      .ids = route.ids, .ids_are_int64 = false, .scores = route.scores, .token_offsets = nullptr};
  return run(place, layer, given, chosen, buffer, out);
}

Tensor rows_like(Place const& place, Tensor const& x) {
  require_dims(x, "x", 2);
  return place.empty({x.size(0), x.size(1)}, dtype_of(x, "x"));
}

// moe_forward into out (T, H), keeping nothing -> offsets
Tensor moe_forward_out(Tensor const& x, Tensor const& ids, Tensor const& scores,
                       MaybeTensor const& token_offsets, MaybeTensor const& residual,
                       Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                       double alpha, double limit, double up_offset, bool clamp_after,
                       bool interleaved, bool transposed, Tensor& out,
                       MaybeTensor const& experts_at) {
  Place const place(x, "x");
  Slots const slots = slots_of(place, ids, "ids", token_offsets);
  Layer const layer = layer_of(place, x, slots, w_down,
                               activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                               {interleaved, transposed, experts_at});
  Chosen const chosen = chosen_of(place, layer, slots, ids, scores);
  require_apart({{"out", out}}, {{"x", x},
                                 {"ids", ids},
                                 {"scores", scores},
                                 {"token_offsets", token_offsets},
                                 {"residual", residual},
                                 {"w_up", own_memory(w_up, experts_at)},
                                 {"w_gate", own_memory(w_gate, experts_at)},
                                 {"w_down", own_memory(w_down, experts_at)},
                                 {"b_up", b_up},
                                 {"b_down", b_down},
                                 {"experts_at", experts_at}});
  Buffer const buffer(place, layer, {.routes = false, .router_bytes = 0, .shared = nullptr});
  return run(place, layer, {x, residual, {w_up, w_gate, w_down}, b_up, b_down}, chosen, buffer,
             out);
}

// Router product, route and moe_forward_out: x (T, H), router (E, H) -> offsets
Tensor moe_layer_out(Tensor const& x, Tensor const& router, MaybeTensor const& router_bias,
                     MaybeTensor const& selection_bias, MaybeTensor const& token_mask,
                     int64_t top_k, int64_t score, bool renormalize, double scale, int64_t groups,
                     int64_t top_groups, double sum_floor, int64_t group_score,
                     MaybeTensor const& residual, Tensor const& w_up, Tensor const& w_down,
                     MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                     double alpha, double limit, double up_offset, bool clamp_after,
                     bool interleaved, bool transposed, Tensor& out) {
  Place const place(x, "x");
  require_apart({{"out", out}}, {{"x", x},
                                 {"router.weight", router},
                                 {"router.bias", router_bias},
                                 {"selection_bias", selection_bias},
                                 {"token_mask", token_mask},
                                 {"residual", residual},
                                 {"w_up", w_up},
                                 {"w_down", w_down},
                                 {"b_up", b_up},
                                 {"b_down", b_down}});
  RoutedBy const by{
      router,         router_bias,
      selection_bias, token_mask,
      top_k,          {score, renormalize, scale, groups, top_groups, sum_floor, group_score}};
  return run_layer(place, {x, residual, {w_up, std::nullopt, w_down}, b_up, b_down}, by,
                   activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                   {interleaved, transposed, std::nullopt}, std::nullopt, out);
}

// The same two into a new tensor -> out (T, H), offsets, with fewer arguments: ids are (T, K), w_up
// is one tensor, no token is masked. Instead of a residual, infer_layer can take the weights of
// shared experts, which it runs with the layer's activation and order: (W, H), or (2 W, H) with a
// gate, and (H, W). Their results are multiplied by shared_scale, (T, 1) in the scores' dtype, or
// by sigmoid(x shared_gate^T) of 16-bit operands with shared_gate (1, H). settings, float64 on the
// CPU: kind, gated, alpha, limit, up_offset, clamp_after, interleaved, transposed; for infer_layer
// also top_k, score, renormalize, scale, groups, top_groups, sum_floor, group_score.
Tensors2 infer_experts(Tensor const& x, Tensor const& ids, Tensor const& scores,
                       MaybeTensor const& residual, Tensor const& w_up, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, Tensor const& numbers) {
  Place const place(x, "x");
  Settings const settings(numbers, kOfExperts);
  Slots const slots = slots_of(place, ids, "ids", std::nullopt);
  Layer const layer = layer_of(place, x, slots, w_down, settings.activation(), settings.flags());
  Chosen const chosen = chosen_of(place, layer, slots, ids, scores);
  Tensor const out = rows_like(place, x);
  Buffer const buffer(place, layer, {.routes = false, .router_bytes = 0, .shared = nullptr});
  Tensor const offsets = run(
      place, layer, {x, residual, {w_up, std::nullopt, w_down}, b_up, b_down}, chosen, buffer, out);
  return {out, offsets};
}

Tensors2 infer_layer(Tensor const& x, Tensor const& router, MaybeTensor const& router_bias,
                     MaybeTensor const& selection_bias, MaybeTensor const& residual,
                     MaybeTensor const& shared_up, MaybeTensor const& shared_down,
                     MaybeTensor const& shared_scale, MaybeTensor const& shared_gate,
                     Tensor const& w_up, Tensor const& w_down, MaybeTensor const& b_up,
                     MaybeTensor const& b_down, Tensor const& numbers) {
  Place const place(x, "x");
  Settings const settings(numbers, kOfExperts + kOfRouter);
  MaybeTensor const all;
  RoutedBy const by{router,           router_bias,      selection_bias, /*token_mask=*/all,
                    settings.top_k(), settings.router()};
  bool const dense = shared_up.has_value();
  require(shared_down.has_value() == dense && !(dense && residual.has_value()) &&
              (dense || !(shared_scale.has_value() || shared_gate.has_value())),
          "shared_up: expected both weights and no residual, or neither weight");
  require(!(shared_scale.has_value() && shared_gate.has_value()),
          "shared_gate: expected no shared_scale together with it");
  std::optional<Shared> shared;
  if (dense) shared.emplace(Shared{*shared_up, *shared_down, shared_scale, shared_gate});
  Tensor const out = rows_like(place, x);
  Tensor const offsets = run_layer(place, {x, residual, {w_up, std::nullopt, w_down}, b_up, b_down},
                                   by, settings.activation(), settings.flags(), shared, out);
  return {out, offsets};
}

// Only shared experts; settings as for infer_experts, weights never transposed.
Tensor infer_shared(Tensor const& x, Tensor const& w_up, Tensor const& w_down,
                    Tensor const& numbers) {
  Place const place(x, "x");
  Settings const settings(numbers, kOfExperts);
  Tensor const out = rows_like(place, x);
  Layer plain;
  plain.sizes = {.tokens = x.size(0), .hidden = x.size(1)};
  plain.dtype = dtype_of(x, "x");
  plain.activation = settings.activation();
  plain.order = order_of(settings.flags().interleaved);
  MaybeTensor const no_scale;
  Shared const shared{w_up, w_down, no_scale, no_scale};
  Layer const layer = shared_layer(plain, shared);
  Carver counting(nullptr);
  carve_shared(counting, layer);
  Tensor const memory = place.workspace(counting.used());
  Carver carver(memory.data_ptr());
  run_shared(place, layer, x, shared, carve_shared(carver, layer), out.data_ptr());
  return out;
}

}  // namespace

void define_inference(Library& m) {
  m.def(
      "moe_forward_out(Tensor x, Tensor ids, Tensor scores, Tensor? token_offsets, Tensor? "
      "residual, Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? "
      "b_down, " GUILD_ACTIVATION ", bool interleaved, bool transposed, Tensor(a!) out" GUILD_LISTS
      ") -> Tensor offsets");
  m.def(
      "moe_layer_out(Tensor x, Tensor router, Tensor? router_bias, Tensor? selection_bias, Tensor? "
      "token_mask, int "
      "top_k, int score, bool renormalize, float scale, int groups, int top_groups, float "
      "sum_floor, int group_score, Tensor? residual, Tensor w_up, Tensor w_down, Tensor? b_up, "
      "Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, Tensor(a!) out) -> Tensor offsets");
  m.def(
      "infer_experts(Tensor x, Tensor ids, Tensor scores, Tensor? residual, Tensor w_up, Tensor "
      "w_down, Tensor? b_up, Tensor? b_down, Tensor settings) -> (Tensor o, Tensor offsets)");
  m.def(
      "infer_layer(Tensor x, Tensor router, Tensor? router_bias, Tensor? selection_bias, Tensor? "
      "residual, Tensor? "
      "shared_up, Tensor? shared_down, Tensor? shared_scale, Tensor? shared_gate, Tensor w_up, "
      "Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor settings) -> (Tensor o, Tensor "
      "offsets)");
  m.def("infer_shared(Tensor x, Tensor w_up, Tensor w_down, Tensor settings) -> Tensor");
}

void implement_inference(Library& m) {
  m.impl("moe_forward_out", TORCH_BOX(&moe_forward_out));
  m.impl("moe_layer_out", TORCH_BOX(&moe_layer_out));
  m.impl("infer_experts", TORCH_BOX(&infer_experts));
  m.impl("infer_layer", TORCH_BOX(&infer_layer));
  m.impl("infer_shared", TORCH_BOX(&infer_shared));
}

}  // namespace guild::binding
