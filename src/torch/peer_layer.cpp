// A layer over ranks that reach each other's memory: guild/peer_layer.h on tensors.
#include "guild/peer_layer.h"

#include <algorithm>

#include "torch/backward.h"
#include "torch/exchange.h"
#include "torch/ops.h"
#include "torch/routing.h"

namespace guild::binding {

namespace {

// Raw streams (link, side), or nothing; the counter is kept by the caller.
PeerStreams streams_of(Numbers const& streams, Tensor const& counter) {
  require(streams.empty() || streams.size() == 2, "streams: expected 0 or 2, got ", streams.size());
  if (streams.empty()) return {};
  return {reinterpret_cast<CUstream_st*>(streams[0]), reinterpret_cast<CUstream_st*>(streams[1]),
          static_cast<int32_t*>(counter.data_ptr())};
}

int64_t height_of(Tensor const& matrix, char const* name) {
  require_dims(matrix, name, 2);
  return matrix.size(0);
}

// The layer of this rank's experts: its tokens are those of all ranks. room: as in Sizes.
Layer whole_layer(Place const& place, PeerMemory const& memory, Tensor const& x, int64_t top_k,
                  int64_t room, Tensor const& w_down, Activation const& activation,
                  bool interleaved, bool transposed) {
  Slots const slots{.tokens = memory.ranks * memory.tokens, .top_k = top_k};
  Layer layer =
      layer_of(place, x, slots, w_down, activation, {interleaved, transposed, std::nullopt});
  layer.sizes.tokens = slots.tokens;
  layer.sizes.room = room;
  return layer;
}

Pull pull_of(PeerMemory const& memory, Tensor const& ids, Tensor const& rows, DType dtype) {
  return {.memory = memory,
          .top_k = ids.size(1),
          .row_bytes = rows.size(1) * element_bytes(dtype),
          .ids = static_cast<int32_t const*>(ids.data_ptr()),
          .rows = rows.data_ptr()};
}

Push push_of(PeerMemory const& memory, Sizes const& s, DType dtype, int32_t const* slot_row,
             int32_t const* counts) {
  return {.memory = memory,
          .dtype = dtype,
          .hidden = s.hidden,
          .rows = s.rows(),
          .top_k = s.top_k,
          .y = {},
          .row_of = slot_row,
          .tokens = counts};
}

Tables tables_of(PeerMemory const& memory, int64_t top_k, int64_t experts, DType score,
                 Tensor const& ids, Tensor const& scores, Tensor const& counts) {
  return {.memory = memory,
          .top_k = top_k,
          .experts = experts,
          .score_bytes = element_bytes(score),
          .ids = static_cast<int32_t*>(ids.data_ptr()),
          .scores = scores.data_ptr(),
          .tokens = static_cast<int32_t*>(counts.data_ptr())};
}

Collect collect_of(PeerMemory const& memory, DType dtype, Tensor const& o, int32_t const* token_row,
                   Rows residual) {
  return {.memory = memory,
          .dtype = dtype,
          .tokens = o.size(0),
          .hidden = o.size(1),
          .token_row = token_row,
          .residual = residual,
          .o = o.data_ptr()};
}

// Scores of the slots whose rows were pulled.
PushScores push_scores_of(Pull const& pull, DType score, void const* scores) {
  return {.memory = pull.memory,
          .top_k = pull.top_k,
          .score_bytes = element_bytes(score),
          .ids = pull.ids,
          .scores = scores};
}

// The up projection that recomputes h.
UpProjection again_of(Layer const& layer, Routing const& routing, MoeForward const& forward) {
  return {.sizes = layer.sizes,
          .dtype = layer.dtype,
          .activation = layer.activation,
          .order = layer.order,
          .routing = routing,
          .x = forward.x,
          .w_up = forward.w_up,
          .bias = forward.b_up,
          .h = {},
          .a = {}};
}

// Both barriers of a pass.
template <class Pass>
void set_barriers(Pass& pass, PeerMemory const& memory, double seconds, Numbers const& facts,
                  Numbers const& facts_returned, Tensor const& report) {
  pass.published = meet_of(memory, seconds, facts, report);
  pass.published.published = true;
  pass.returned = meet_of(memory, seconds, facts_returned, report);
}

// o (T, H); what backward needs: rows (ranks * Tm, H), h (kept, W), offsets, row_token,
// slot_row (ranks * Tm, K), row_score, token_row (T, ranks), by_slot (ranks * Tm, K) and counts
// (ranks) of Tables; offsets (E of all ranks + 1) of this rank's tokens
using PeerForwardTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                      Tensor, Tensor, Tensor, Tensor>;

// facts of both barriers, as peer_meet takes them; streams: link and side of PeerStreams, or none.
// ids (T, K) int32 among all ranks' `experts`; weights are this rank's. room: of rows, R at most;
// if more come, every rank's report says so and all results are NaN. -1: ranks * Tm * K. kept: rows
// of h, R at most; if the experts have more, backward computes all of h again.
PeerForwardTensors peer_forward(Tensor const& peers, Numbers memory, double seconds, Numbers facts,
                                Numbers facts_returned, Tensor& report, Numbers streams,
                                Tensor const& x, Tensor const& ids, Tensor const& scores,
                                int64_t experts, MaybeTensor const& residual, Tensor const& w_up,
                                MaybeTensor const& w_gate, Tensor const& w_down,
                                MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind,
                                bool gated, double alpha, double limit, double up_offset,
                                bool clamp_after, bool interleaved, bool transposed, int64_t room,
                                int64_t kept) {
  Place const place(x, "x");
  PeerMemory const m = memory_of(place, peers, memory);
  Published const published = publish_of(place, m, x, ids, scores, experts);
  int64_t const top_k = published.args.top_k, tokens = published.args.tokens;
  Layer const layer = whole_layer(place, m, x, top_k, room, w_down,
                                  activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                                  interleaved, transposed);
  Sizes const& s = layer.sizes;
  require(s.experts * m.ranks == experts, "w_down: expected ", experts, " experts over ", m.ranks,
          " ranks, got ", s.experts, " on this one");
  DType const dtype = layer.dtype, score = score_dtype(dtype);
  Tensor by_slot = place.empty_int32({s.tokens, top_k}), counts = place.empty_int32({m.ranks});
  Tensor const received = place.empty({s.tokens, top_k}, score);
  Tensor rows = place.empty({s.tokens, s.hidden}, dtype);
  require(kept >= 0, "kept: expected at least 0, got ", kept);
  kept = std::min(kept, s.rows());
  Tensor h = place.empty({kept, layer.width()}, dtype);
  Tensor o = place.empty({tokens, s.hidden}, dtype);
  Sorting sort = sorting(place, by_slot, received, s.experts, score, std::nullopt, room);
  Sorting own = sorting(place, ids, scores, experts, score, std::nullopt);
  Tensor const workspace = place.workspace(moe_forward_workspace_bytes(s, dtype));
  Tensor const counter = place.empty_int32({1});

  PeerForward f;
  f.publish = published.args;
  f.streams = streams_of(streams, counter);
  set_barriers(f, m, seconds, facts, facts_returned, report);
  f.returned.needed = sort.args.offsets + s.experts;
  f.returned.capacity = s.rows();
  f.tables = tables_of(m, top_k, experts, score, by_slot, received, counts);
  f.pull = pull_of(m, by_slot, rows, dtype);
  Routing const routing{sort.args.offsets, sort.args.row_token, sort.args.slot_row,
                        sort.args.row_score, received.data_ptr()};
  f.layer = forward_args(place, layer, routing, rows, {w_up, w_gate, w_down}, b_up, b_down,
                         workspace.data_ptr());
  f.layer.h = {h.data_ptr(), 0};
  f.kept_rows = kept;
  f.layer.sort = &sort.args;
  f.push = push_of(m, s, dtype, sort.args.slot_row, f.tables.tokens);
  f.push.scores = received.data_ptr();
  f.collect = collect_of(m, dtype, o, static_cast<int32_t*>(published.token_row.data_ptr()),
                         place.rows(residual, "residual", dtype, {tokens, s.hidden}));
  f.own = own.args;
  place.run(cpu::peer_forward, cuda::peer_forward, f);
  return PeerForwardTensors(o, rows, h, sort.offsets, sort.row_token, sort.slot_row, sort.row_score,
                            published.token_row, by_slot, counts, own.offsets);
}

// -> dx (T, H), dscores (T, K), dw_up, dw_gate, dw_down, db_up, db_down. wanted: as in
// moe_backward, with kRows for dx.
Tensors7 peer_backward(Tensor const& peers, Numbers memory, double seconds, Numbers facts,
                       Numbers facts_returned, Tensor& report, Numbers streams, Tensor const& dout,
                       Tensor const& rows, Tensor const& h, Tensor const& offsets,
                       Tensor const& row_token, Tensor const& slot_row, Tensor const& row_score,
                       Tensor const& token_row, Tensor const& by_slot, Tensor const& counts,
                       Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                       double alpha, double limit, double up_offset, bool clamp_after,
                       bool interleaved, bool transposed, int64_t wanted) {
  Place const place(dout, "dout");
  PeerMemory const m = memory_of(place, peers, memory);
  require_dims(by_slot, "by_slot", 2);
  int64_t const top_k = by_slot.size(1), tokens = height_of(dout, "dout");
  Layer const layer = whole_layer(place, m, rows, top_k, length_of(row_token, "row_token"), w_down,
                                  activation_of(kind, gated, alpha, limit, up_offset, clamp_after),
                                  interleaved, transposed);
  Sizes const& s = layer.sizes;
  DType const dtype = layer.dtype, score = score_dtype(dtype);
  Slots const slots = slots_of(place, slot_row, "slot_row", std::nullopt);
  auto const routing =
      backward_routing(place, layer, slots, offsets, row_token, slot_row, row_score);
  place.rows(dout, "dout", dtype, {tokens, s.hidden});
  Weights const w{w_up, w_gate, w_down};
  int64_t const kept = std::min(height_of(h, "h"), s.rows());
  bool const again = kept < s.rows(), wants_rows = wanted & kRows, wants_scores = wanted & kScores;
  Tensor const again_offsets = place.empty_int32({again ? s.experts + 1 : 0});
  Tensor const pulled = place.empty({s.tokens, s.hidden}, dtype), counter = place.empty_int32({1});
  auto [g, args] = backward_call(place, layer, routing, slots, pulled, rows, h, w, b_down,
                                 wanted & ~int64_t(kX), kept);
  Tensor dx = place.empty({wants_rows ? tokens : 0, s.hidden}, dtype);
  Tensor dscores = place.empty({wants_scores ? tokens : 0, top_k}, score);
  Tensor const workspace = place.workspace(moe_backward_workspace_bytes(
      s, dtype, gated, /*combines=*/false, wanted & (kUpBias | kDownBias)));
  args.workspace = workspace.data_ptr();
  Published const published = publish_of(place, m, dout, std::nullopt, std::nullopt, 1);
  PeerBackward b{.publish = published.args};
  b.layer = args;
  b.streams = streams_of(streams, counter);
  set_barriers(b, m, seconds, facts, facts_returned, report);
  place.indices(by_slot, "by_slot", {s.tokens, top_k});
  b.pull = pull_of(m, by_slot, pulled, dtype);
  if (again) {
    b.kept_rows = kept;
    b.again_offsets = static_cast<int32_t*>(again_offsets.data_ptr());
    auto const forward = forward_args(place, layer, routing, rows, w, b_up, b_down, nullptr);
    b.again = again_of(layer, routing, forward);
  }
  b.push = push_of(m, s, dtype, routing.slot_row, place.indices(counts, "counts", {m.ranks}));
  b.push.y = args.dx_rows;
  b.scores = push_scores_of(b.pull, score, args.dscores);
  b.collect =
      collect_of(m, dtype, dx, place.indices(token_row, "token_row", {tokens, m.ranks}), Rows{});
  b.own_scores = {.memory = m,
                  .slots = tokens * top_k,
                  .score_bytes = element_bytes(score),
                  .scores = dscores.data_ptr()};
  place.run(cpu::peer_backward, cuda::peer_backward, b);
  return {dx, dscores, g.dw_up, g.dw_gate, g.dw_down, g.db_up, g.db_down};
}

}  // namespace

void define_peer_layer(Library& m) {
  m.def(
      "peer_forward(Tensor peers, int[] memory, float seconds, int[] facts, int[] facts_returned, "
      "Tensor(a!) report, int[] streams, Tensor x, Tensor ids, Tensor scores, int experts, Tensor? "
      "residual, Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? "
      "b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int room, int kept) -> (Tensor o, Tensor rows, Tensor "
      "h, Tensor offsets, Tensor row_token, Tensor slot_row, Tensor row_score, Tensor token_row, "
      "Tensor by_slot, Tensor counts, Tensor own_offsets)");
  m.def(
      "peer_backward(Tensor peers, int[] memory, float seconds, int[] facts, int[] facts_returned, "
      "Tensor(a!) report, int[] streams, Tensor dout, Tensor rows, Tensor h, Tensor offsets, "
      "Tensor row_token, Tensor slot_row, Tensor row_score, Tensor token_row, Tensor by_slot, "
      "Tensor counts, Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? "
      "b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int wanted) -> (Tensor dx, Tensor dscores, Tensor "
      "dw_up, Tensor dw_gate, Tensor dw_down, Tensor db_up, Tensor db_down)");
}

void implement_peer_layer(Library& m) {
  m.impl("peer_forward", TORCH_BOX(&peer_forward));
  m.impl("peer_backward", TORCH_BOX(&peer_backward));
}

}  // namespace guild::binding
