// Weight and bias gradients into tensors of the caller: written, or added to what is there (fp32
// accumulation over micro-batches, Megatron's main_grad).
#include "torch/ops.h"
#include "torch/overlap.h"

namespace guild::binding {

namespace {

// The order of gate and up, and that of the weights' dimensions.
struct Layout {
  bool gated = true, interleaved = false, transposed;
};

Layer layer_of(Sizes const& sizes, DType dtype, Layout layout) {
  Layer layer;
  layer.sizes = sizes;
  layer.dtype = dtype;
  layer.activation.gated = layout.gated;
  layer.order = order_of(layout.interleaved);
  layer.transposed = layout.transposed;
  return layer;
}

// What the arguments of all weight gradients have in common.
template <class Args>
Args gradient_args(Place const& place, Layer const& layer, Tensor const& offsets,
                   MaybeTensor const& row_token, DType dw_dtype, bool accumulate) {
  Args args;
  args.sizes = layer.sizes;
  args.dtype = layer.dtype;
  args.dw_dtype = dw_dtype;
  args.accumulate = accumulate;
  args.routing = routing_of(place, layer.sizes, offsets, row_token);
  return args;
}

// Rows of x or dout: by token where they are gathered.
Rows input_rows(Place const& place, Layer const& layer, Tensor const& tensor, char const* name,
                MaybeTensor const& row_token) {
  Sizes const& s = layer.sizes;
  return place.rows(tensor, name, layer.dtype,
                    {row_token.has_value() ? s.tokens : s.rows(), s.hidden});
}

// Writes dw_up (with dw_gate if gate and up are separate tensors) and dw_down, each if given, all
// of one type: the rest of backward after data_gradients.
void weight_gradients_out(Tensor const& x, Tensor const& dout, Tensor const& dh,
                          Tensor const& a_scaled, Tensor const& offsets,
                          MaybeTensor const& row_token, MaybeTensor& dw_up, MaybeTensor& dw_gate,
                          MaybeTensor& dw_down, bool gated, bool interleaved, bool transposed,
                          bool accumulate, MaybeTensor const& experts_at) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  require_dims(a_scaled, "a_scaled", 2);
  require_dims(offsets, "offsets", 1);
  require(dw_up.has_value() || !dw_gate.has_value(), "dw_gate: expected none without dw_up");
  if (!dw_up.has_value() && !dw_down.has_value()) return;
  Layer layer = layer_of({.tokens = x.size(0),
                          .hidden = x.size(1),
                          .intermediate = a_scaled.size(1),
                          .experts = offsets.size(0) - 1,
                          .slots = a_scaled.size(0)},
                         dtype_of(x, "x"), {gated, interleaved, transposed});
  Sizes const& s = layer.sizes;
  layer.experts_at = place.lists(experts_at, "experts_at", Layer::kLists, layer.sizes.experts);
  auto args = gradient_args<MoeWeightGradients>(
      place, layer, offsets, row_token,
      dw_up.has_value() ? dtype_of(*dw_up, "dw_up") : dtype_of(*dw_down, "dw_down"), accumulate);
  args.gated = gated;
  args.order = layer.order;
  Tensor const dout_rows = place.aligned(dout);
  args.x = input_rows(place, layer, x, "x", row_token);
  args.dout = input_rows(place, layer, dout_rows, "dout", row_token);
  args.dh = place.rows(dh, "dh", layer.dtype, {s.rows(), layer.width()});
  args.a_scaled = place.rows(a_scaled, "a_scaled", layer.dtype, {s.rows(), s.intermediate});
  if (dw_up.has_value()) args.dw_up = up_weight_of(place, layer, *dw_up, dw_gate, args.dw_dtype);
  if (dw_down.has_value()) args.dw_down = down_weight_of(place, layer, *dw_down, args.dw_dtype);
  require_apart({{"dw_up", own_memory(dw_up, experts_at)},
                 {"dw_gate", own_memory(dw_gate, experts_at)},
                 {"dw_down", own_memory(dw_down, experts_at)}},
                {{"x", x},
                 {"dout", dout},
                 {"dh", dh},
                 {"a_scaled", a_scaled},
                 {"offsets", offsets},
                 {"row_token", row_token},
                 {"experts_at", experts_at}});
  Tensor const workspace = place.workspace(moe_weight_gradients_workspace_bytes(s));
  args.workspace = workspace.data_ptr();
  place.run(cpu::moe_weight_gradients, cuda::moe_weight_gradients, args);
}

// The two of them as steps of their own.
void up_weight_gradient_out(Tensor const& x, Tensor const& dh, Tensor const& offsets,
                            MaybeTensor const& row_token, Tensor& dw_up, MaybeTensor& dw_gate,
                            bool gated, bool interleaved, bool transposed, bool accumulate,
                            MaybeTensor const& experts_at) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  require_dims(dh, "dh", 2);
  require_dims(offsets, "offsets", 1);
  int64_t const rows = dh.size(0), width = dh.size(1);
  require(!gated || width % 2 == 0, "dh: expected an even number of columns (gate and up), got ",
          width);
  Layer layer = layer_of({.tokens = x.size(0),
                          .hidden = x.size(1),
                          .intermediate = gated ? width / 2 : width,
                          .experts = offsets.size(0) - 1,
                          .slots = rows},
                         dtype_of(x, "x"), {gated, interleaved, transposed});
  layer.experts_at = place.lists(experts_at, "experts_at", Layer::kLists, layer.sizes.experts);
  auto args = gradient_args<UpWeightGradient>(place, layer, offsets, row_token,
                                              dtype_of(dw_up, "dw_up"), accumulate);
  args.gated = gated;
  args.order = layer.order;
  Tensor const dh_rows = place.aligned(dh);
  args.x = input_rows(place, layer, x, "x", row_token);
  args.dh = place.rows(dh_rows, "dh", layer.dtype, {rows, width});
  args.dw = up_weight_of(place, layer, dw_up, dw_gate, args.dw_dtype);
  require_apart(
      {{"dw_up", own_memory(dw_up, experts_at)}, {"dw_gate", own_memory(dw_gate, experts_at)}},
      {{"x", x},
       {"dh", dh},
       {"offsets", offsets},
       {"row_token", row_token},
       {"experts_at", experts_at}});
  place.run_product(cpu::up_weight_gradient, cuda::up_weight_gradient, args);
}

void down_weight_gradient_out(Tensor const& dout, Tensor const& a, Tensor const& offsets,
                              MaybeTensor const& row_token, Tensor& dw_down, bool transposed,
                              bool accumulate, MaybeTensor const& experts_at) {
  Place const place(dout, "dout");
  require_dims(dout, "dout", 2);
  require_dims(a, "a", 2);
  require_dims(offsets, "offsets", 1);
  Layer layer = layer_of({.tokens = dout.size(0),
                          .hidden = dout.size(1),
                          .intermediate = a.size(1),
                          .experts = offsets.size(0) - 1,
                          .slots = a.size(0)},
                         dtype_of(dout, "dout"), {.transposed = transposed});
  layer.experts_at = place.lists(experts_at, "experts_at", Layer::kLists, layer.sizes.experts);
  auto args = gradient_args<DownWeightGradient>(place, layer, offsets, row_token,
                                                dtype_of(dw_down, "dw_down"), accumulate);
  Tensor const dout_rows = place.aligned(dout);
  args.dout = input_rows(place, layer, dout_rows, "dout", row_token);
  args.a = place.rows(a, "a", layer.dtype, {a.size(0), a.size(1)});
  args.dw = down_weight_of(place, layer, dw_down, args.dw_dtype);
  require_apart({{"dw_down", own_memory(dw_down, experts_at)}}, {{"dout", dout},
                                                                 {"a", a},
                                                                 {"offsets", offsets},
                                                                 {"row_token", row_token},
                                                                 {"experts_at", experts_at}});
  place.run_product(cpu::down_weight_gradient, cuda::down_weight_gradient, args);
}

void bias_gradient_out(Tensor const& m, Tensor const& offsets, MaybeTensor const& row_token,
                       MaybeTensor const& row_score, Tensor& db, bool accumulate) {
  Place const place(m, "m");
  require_dims(m, "m", 2);
  require_dims(offsets, "offsets", 1);
  BiasGradient args;
  args.tokens = m.size(0);
  args.rows = row_token.has_value() ? length_of(*row_token, "row_token") : m.size(0);
  args.width = m.size(1);
  args.experts = offsets.size(0) - 1;
  args.dtype = dtype_of(m, "m");
  args.db_dtype = dtype_of(db, "db");
  args.accumulate = accumulate;
  args.routing = routing_of(place, {.experts = args.experts, .slots = args.rows}, offsets,
                            row_token, row_score, score_dtype(args.dtype));
  args.m = place.rows(m, "m", args.dtype, {m.size(0), args.width});
  args.db = place.rows(db, "db", args.db_dtype, {args.experts, args.width});
  require_apart(
      {{"db", db}},
      {{"m", m}, {"offsets", offsets}, {"row_token", row_token}, {"row_score", row_score}});
  place.run(cpu::bias_gradient, cuda::bias_gradient, args);
}

}  // namespace

void define_weight_gradients(Library& m) {
  m.def(
      "up_weight_gradient_out(Tensor x, Tensor dh, Tensor offsets, Tensor? row_token, Tensor(a!) "
      "dw_up, Tensor(b!)? dw_gate, bool gated, bool interleaved, bool transposed, bool "
      "accumulate" GUILD_LISTS ") -> ()");
  m.def(
      "down_weight_gradient_out(Tensor dout, Tensor a, Tensor offsets, Tensor? row_token, "
      "Tensor(a!) dw_down, bool transposed, bool accumulate" GUILD_LISTS ") -> ()");
  m.def(
      "weight_gradients_out(Tensor x, Tensor dout, Tensor dh, Tensor a_scaled, Tensor offsets, "
      "Tensor? row_token, Tensor(a!)? dw_up, Tensor(b!)? dw_gate, Tensor(c!)? dw_down, bool gated, "
      "bool interleaved, bool transposed, bool accumulate" GUILD_LISTS ") -> ()");
  m.def(
      "bias_gradient_out(Tensor m, Tensor offsets, Tensor? row_token, Tensor? row_score, "
      "Tensor(a!) db, bool accumulate) -> ()");
}

void implement_weight_gradients(Library& m) {
  m.impl("up_weight_gradient_out", TORCH_BOX(&up_weight_gradient_out));
  m.impl("down_weight_gradient_out", TORCH_BOX(&down_weight_gradient_out));
  m.impl("weight_gradients_out", TORCH_BOX(&weight_gradients_out));
  m.impl("bias_gradient_out", TORCH_BOX(&bias_gradient_out));
}

}  // namespace guild::binding
