// Level 1: the grouped product in its four cases, and the fused pair on sorted rows.
#include "torch/forward.h"
#include "torch/ops.h"
#include "torch/overlap.h"

namespace guild::binding {

namespace {

using Ragged = GroupedGemm::Ragged;
using Operand = GroupedGemm::Operand;

// (rows, cols), or (groups, rows, cols) where there are three dimensions.
Operand operand_of(Tensor const& t, int32_t const* group_at = nullptr) {
  int64_t const d = t.dim();
  return {t.data_ptr(), d == 3 ? matrix_stride(t) : 0, t.stride(d - 2), t.stride(d - 1), group_at};
}

// Case and sizes from the number of dimensions of a and b.
GroupedGemm shape_of(Tensor const& a, Tensor const& b, MaybeTensor const& offs) {
  for (auto const& [t, name] : {std::pair(&a, "mat_a"), std::pair(&b, "mat_b")}) {
    require(t->dim() == 2 || t->dim() == 3, name, ": expected 2 or 3 dimensions, got ", t->dim());
  }
  bool const a3 = a.dim() == 3, b3 = b.dim() == 3;
  GroupedGemm g;
  g.ragged = a3 ? (b3 ? Ragged::none : Ragged::columns) : (b3 ? Ragged::rows : Ragged::inner);
  bool const ragged = g.ragged != Ragged::none;
  require(offs.has_value() == ragged, "offs: expected ",
          ragged ? "the end of each group" : "none where mat_a and mat_b have 3 dimensions");
  if (ragged) require_dims(*offs, "offs", 1);
  g.groups = a3 ? a.size(0) : b3 ? b.size(0) : offs->size(0);
  g.m = a.size(a.dim() - 2);
  g.k = a.size(a.dim() - 1);
  g.n = b.size(b.dim() - 1);
  return g;
}

// Fills in everything but the output, checking shapes, types and devices.
GroupedGemm product_of(Place const& place, Tensor const& a, Tensor const& b,
                       MaybeTensor const& offs, MaybeTensor const& bias, MaybeTensor const& a_at,
                       MaybeTensor const& b_at) {
  GroupedGemm g = shape_of(a, b, offs);
  g.dtype = dtype_of(a, "mat_a");
  auto const check = [&](Tensor const& t, char const* name, int64_t rows, int64_t cols) {
    t.dim() == 3 ? place.typed(t, name, g.dtype, {g.groups, rows, cols})
                 : place.typed(t, name, g.dtype, {rows, cols});
  };
  check(a, "mat_a", g.m, g.k);
  check(b, "mat_b", g.k, g.n);
  g.a = operand_of(a, place.lists(a_at, "a_at", 1, g.groups));
  g.b = operand_of(b, place.lists(b_at, "b_at", 1, g.groups));
  if (offs.has_value()) g.offsets = place.indices(*offs, "offs", {g.groups});
  g.bias = place.rows(bias, "bias", g.dtype, {g.groups, g.ragged == Ragged::columns ? g.m : g.n});
  return g;
}

bool stacked_output(Ragged ragged) { return ragged == Ragged::inner || ragged == Ragged::none; }

// A view (E, rows, columns) of the experts' matrices, which are shaped like `first` and lie
// `stride` elements apart from it on; the caller keeps that memory alive.
Tensor expert_view(Tensor const& first, int64_t experts, int64_t stride) {
  Place const place(first, "first");
  require_dims(first, "first", 2);
  return place.view(first, {experts, first.size(0), first.size(1)},
                    {stride, first.stride(0), first.stride(1)});
}

// Copies indices, int32 on the CPU, to the device of `like`.
Tensor expert_table(Tensor const& like, Tensor const& indices) {
  require_dims(indices, "indices", 2);
  int64_t const lists = indices.size(0), experts = indices.size(1);
  Place const host(indices, "indices");
  require(!host.on_cuda(), "indices: expected a CPU tensor");
  int32_t const* const from = host.indices(indices, "indices", {lists, experts});
  Place const place(like, "like");
  Tensor table = place.empty_int32({lists, experts});
  place.copy_indices(from, lists * experts, static_cast<int32_t*>(table.data_ptr()));
  return table;
}

// The four cases of torch._grouped_mm; offs (E) are END positions. a_at, b_at, out_at: int32 (1,
// E), guild::GroupedGemm::Operand::group_at of each.
Tensor grouped_mm(Tensor const& a, Tensor const& b, MaybeTensor const& offs,
                  MaybeTensor const& bias, bool float_out, MaybeTensor const& a_at,
                  MaybeTensor const& b_at) {
  Place const place(a, "mat_a");
  GroupedGemm g = product_of(place, a, b, offs, bias, a_at, b_at);
  g.out_dtype = float_out ? DType::float32 : g.dtype;
  Tensor out = stacked_output(g.ragged) ? place.empty({g.groups, g.m, g.n}, g.out_dtype)
                                        : place.empty({g.m, g.n}, g.out_dtype);
  g.d = operand_of(out);
  place.run_product(cpu::grouped_gemm, cuda::grouped_gemm, g);
  return out;
}

void grouped_mm_out(Tensor const& a, Tensor const& b, MaybeTensor const& offs,
                    MaybeTensor const& bias, Tensor& out, bool accumulate, MaybeTensor const& a_at,
                    MaybeTensor const& b_at, MaybeTensor const& out_at) {
  Place const place(a, "mat_a");
  GroupedGemm g = product_of(place, a, b, offs, bias, a_at, b_at);
  g.out_dtype = dtype_of(out, "out");
  g.accumulate = accumulate;
  stacked_output(g.ragged) ? place.data(out, "out", {g.groups, g.m, g.n})
                           : place.data(out, "out", {g.m, g.n});
  require_apart({{"out", own_memory(out, out_at)}}, {{"mat_a", own_memory(a, a_at)},
                                                     {"mat_b", own_memory(b, b_at)},
                                                     {"offs", offs},
                                                     {"bias", bias},
                                                     {"a_at", a_at},
                                                     {"b_at", b_at},
                                                     {"out_at", out_at}});
  g.d = operand_of(out, place.lists(out_at, "out_at", 1, g.groups));
  place.run_product(cpu::grouped_gemm, cuda::grouped_gemm, g);
}

// The fused pair on sorted rows, weights (E, in, out): x -> a (zero past offsets[E]) and h.
Tensors2 pair_up(Tensor const& x, Tensor const& w_up, Tensor const& offsets,
                 MaybeTensor const& bias, int64_t kind, bool gated, double alpha, double limit,
                 double up_offset, bool clamp_after, bool interleaved) {
  Place const place(x, "x");
  require_dims(x, "x", 2);
  require_dims(w_up, "w_up", 3);
  Layer layer;
  layer.activation = activation_of(kind, gated, alpha, limit, up_offset, clamp_after);
  layer.dtype = dtype_of(x, "x");
  layer.order = order_of(interleaved);
  layer.transposed = true;
  int64_t const width = w_up.size(2);
  require(!gated || width % 2 == 0, "w_up: expected an even number of columns (gate and up), got ",
          width);
  layer.sizes = {.tokens = x.size(0),
                 .hidden = x.size(1),
                 .intermediate = gated ? width / 2 : width,
                 .experts = w_up.size(0),
                 .top_k = 1};
  Sizes const& s = layer.sizes;
  UpProjection args;
  args.sizes = s;
  args.dtype = layer.dtype;
  args.activation = layer.activation;
  args.order = layer.order;
  args.routing = routing_of(place, s, offsets);
  args.x = place.rows(x, "x", layer.dtype, {s.tokens, s.hidden});
  args.w_up = as_const(up_weight_of(place, layer, w_up, std::nullopt, layer.dtype));
  args.bias = place.rows(bias, "bias", layer.dtype, {s.experts, width});
  Tensor a =
      sorted_rows(place, {s.tokens, s.intermediate}, layer.dtype, args.routing.offsets, s.experts);
  Tensor h = place.empty({s.tokens, width}, layer.dtype);
  args.a = {a.data_ptr(), 0};
  args.h = {h.data_ptr(), 0};
  place.run_product(cpu::up_projection, cuda::up_projection, args);
  return {a, h};
}

// a W + bias, zero past offsets[E]. aux and the activation are only for its gradient: with aux the
// gradient goes to aux instead of a.
Tensor pair_down(Tensor const& a, MaybeTensor const&, Tensor const& w_down, Tensor const& offsets,
                 MaybeTensor const& bias, int64_t, bool, double, double, double, bool, bool) {
  Place const place(a, "swiglu_out");
  require_dims(a, "swiglu_out", 2);
  require_dims(w_down, "w_down", 3);
  GroupedGemm g;
  g.ragged = Ragged::rows;
  g.m = a.size(0);
  g.k = a.size(1);
  g.n = w_down.size(2);
  g.groups = w_down.size(0);
  g.dtype = g.out_dtype = dtype_of(a, "swiglu_out");
  place.rows(a, "swiglu_out", g.dtype, {g.m, g.k});
  place.typed(w_down, "w_down", g.dtype, {g.groups, g.k, g.n});
  g.a = operand_of(a);
  g.b = operand_of(w_down);
  g.offsets = place.indices(offsets, "offsets", {g.groups + 1}) + 1;  // starts to ends
  g.bias = place.rows(bias, "bias", g.dtype, {g.groups, g.n});
  Tensor out = place.empty({g.m, g.n}, g.dtype);
  g.d = operand_of(out);
  place.run_product(cpu::grouped_gemm, cuda::grouped_gemm, g);
  return out;
}

}  // namespace

void define_products(Library& m) {
  m.def("expert_view(Tensor first, int experts, int stride) -> Tensor");
  m.def("expert_table(Tensor like, Tensor indices) -> Tensor");
  m.def(
      "grouped_mm(Tensor mat_a, Tensor mat_b, Tensor? offs, Tensor? bias, bool float_out, Tensor? "
      "a_at=None, Tensor? b_at=None) -> Tensor");
  m.def(
      "grouped_mm_out(Tensor mat_a, Tensor mat_b, Tensor? offs, Tensor? bias, Tensor(a!) out, "
      "bool accumulate, Tensor? a_at=None, Tensor? b_at=None, Tensor? out_at=None) -> ()");
  m.def("pair_up(Tensor x, Tensor w_up, Tensor offsets, Tensor? bias, " GUILD_ACTIVATION
        ", bool interleaved) -> (Tensor a, Tensor h)");
  m.def("pair_down(Tensor a, Tensor? aux, Tensor w_down, Tensor offsets, Tensor? bias, "  //
        GUILD_ACTIVATION ", bool interleaved) -> Tensor");
}

void implement_products(Library& m) {
  m.impl("expert_view", TORCH_BOX(&expert_view));
  m.impl("expert_table", TORCH_BOX(&expert_table));
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm));
  m.impl("grouped_mm_out", TORCH_BOX(&grouped_mm_out));
  m.impl("pair_up", TORCH_BOX(&pair_up));
  m.impl("pair_down", TORCH_BOX(&pair_down));
}

}  // namespace guild::binding
