// Rows between ranks that reach each other's memory: guild/exchange.h on tensors.
//
// `peers` (ranks) int64 are the addresses of every rank's memory; `memory` is rank, tokens, top_k,
// row_bytes and returned of PeerMemory.
#include "torch/exchange.h"

#include <algorithm>

#include "torch/ops.h"

namespace guild::binding {

namespace {

PeerMemory memory_of(int64_t ranks, Numbers const& m) {
  require(m.size() == 5, "memory: expected 5 numbers, got ", m.size());
  return {.ranks = ranks,
          .rank = m[0],
          .tokens = m[1],
          .top_k = m[2],
          .row_bytes = m[3],
          .returned = m[4]};
}

}  // namespace

PeerMemory memory_of(Place const& place, Tensor const& peers, Numbers const& m) {
  static_assert(sizeof(void*) == sizeof(int64_t));
  require_dims(peers, "peers", 1);
  PeerMemory memory = memory_of(peers.size(0), m);
  require(is_int64(peers, "peers") && peers.is_contiguous(),
          "peers: expected a contiguous tensor of int64");
  memory.peers = static_cast<void* const*>(place.data(peers, "peers", {memory.ranks}));
  return memory;
}

std::tuple<int64_t, int64_t, int64_t> peer_memory_sizes(int64_t ranks, Numbers memory) {
  PeerMemory const m = memory_of(ranks, memory);
  return {peer_memory_bytes(m), returned_rows_offset(m), returned_scores_offset(m)};
}

Published publish_of(Place const& place, PeerMemory const& memory, Tensor const& rows,
                     MaybeTensor const& ids, MaybeTensor const& scores, int64_t experts) {
  require_dims(rows, "rows", 2);
  int64_t const tokens = rows.size(0), hidden = rows.size(1);
  DType const dtype = dtype_of(rows, "rows");
  Tensor const sent = place.aligned(rows);
  Rows const view = place.rows(sent, "rows", dtype, {tokens, hidden});
  Publish args{.memory = memory,
               .tokens = tokens,
               .row_bytes = hidden * element_bytes(dtype),
               .rows = view.data,
               .row_stride = (view.stride == 0 ? hidden : view.stride) * element_bytes(dtype)};
  Tensor token_row = place.empty_int32({ids.has_value() ? tokens : 0, memory.ranks});
  if (ids.has_value()) {
    require_dims(*ids, "ids", 2);
    require(scores.has_value(), "scores: expected a tensor with ids, got None");
    args.top_k = ids->size(1);
    args.experts = experts;
    DType const score = score_dtype(dtype);
    args.score_bytes = element_bytes(score);
    args.ids = place.indices(*ids, "ids", {tokens, args.top_k});
    args.scores = place.packed(*scores, "scores", score, {tokens, args.top_k});
    args.token_row = static_cast<int32_t*>(token_row.data_ptr());
  }
  return {args, token_row, sent};
}

Meet meet_of(PeerMemory const& memory, double seconds, Numbers const& facts, Tensor const& report) {
  require(facts.size() <= size_t(kMostFacts), "facts: expected at most ", kMostFacts, ", got ",
          facts.size());
  Place const host(report, "report");
  require(!host.on_cuda() && is_int64(report, "report") && report.is_contiguous(),
          "report: expected a contiguous CPU tensor of int64, pinned where peers are on a GPU");
  Meet args{.memory = memory, .seconds = seconds, .count = int64_t(facts.size())};
  std::copy(facts.begin(), facts.end(), args.facts);
  args.report = static_cast<PeerReport*>(
      host.data(report, "report", {int64_t(sizeof(PeerReport) / sizeof(int64_t))}));
  return args;
}

namespace {

// rows (T, H), ids (T, K) int32 and scores (T, K), both or none -> token_row (T, ranks) or (0,
// ranks)
Tensor peer_publish(Tensor const& peers, Numbers memory, Tensor const& rows, MaybeTensor const& ids,
                    MaybeTensor const& scores, int64_t experts) {
  Place const place(rows, "rows");
  Published const found =
      publish_of(place, memory_of(place, peers, memory), rows, ids, scores, experts);
  place.run(cpu::publish, cuda::publish, found.args);
  return found.token_row;
}

// report (5) int64 on the host, pinned; needed (1) int32
void peer_meet(Tensor const& peers, Numbers memory, bool published, double seconds, Numbers facts,
               Tensor& report, MaybeTensor const& needed, int64_t capacity) {
  Place const place(peers, "peers");
  Meet args = meet_of(memory_of(place, peers, memory), seconds, facts, report);
  args.published = published;
  args.capacity = capacity;
  if (needed.has_value()) args.needed = place.indices(*needed, "needed", {1});
  place.run(cpu::meet, cuda::meet, args);
}

// -> ids, scores (ranks * Tm, K), tokens (ranks); like: of the layer's dtype
Tensors3 peer_tables(Tensor const& peers, Numbers memory, int64_t top_k, int64_t experts,
                     Tensor const& like) {
  Place const place(peers, "peers");
  DType const score = score_dtype(dtype_of(like, "like"));
  Tables args{.memory = memory_of(place, peers, memory),
              .top_k = top_k,
              .experts = experts,
              .score_bytes = element_bytes(score)};
  int64_t const tokens = args.memory.ranks * args.memory.tokens;
  Tensor ids = place.empty_int32({tokens, top_k}), scores = place.empty({tokens, top_k}, score);
  Tensor counts = place.empty_int32({args.memory.ranks});
  args.ids = static_cast<int32_t*>(ids.data_ptr());
  args.scores = scores.data_ptr();
  args.tokens = static_cast<int32_t*>(counts.data_ptr());
  place.run(cpu::tables, cuda::tables, args);
  return {ids, scores, counts};
}

// ids (ranks * Tm, K), like (T, H) -> (ranks * Tm, H)
Tensor peer_pull(Tensor const& peers, Numbers memory, Tensor const& ids, Tensor const& like) {
  Place const place(like, "like");
  require_dims(like, "like", 2);
  require_dims(ids, "ids", 2);
  DType const dtype = dtype_of(like, "like");
  Pull args{.memory = memory_of(place, peers, memory),
            .top_k = ids.size(1),
            .row_bytes = like.size(1) * element_bytes(dtype)};
  int64_t const tokens = args.memory.ranks * args.memory.tokens;
  args.ids = place.indices(ids, "ids", {tokens, args.top_k});
  Tensor rows = place.empty({tokens, like.size(1)}, dtype);
  args.rows = rows.data_ptr();
  place.run(cpu::pull, cuda::pull, args);
  return rows;
}

void peer_push(Tensor const& peers, Numbers memory, Tensor const& y, Tensor const& row_of,
               MaybeTensor const& scores, MaybeTensor const& token_offsets, Tensor const& tokens,
               bool by_slot) {
  Place const place(y, "y");
  require_dims(y, "y", 2);
  Slots const slots = slots_of(place, row_of, "row_of", token_offsets);
  Push args;
  args.memory = memory_of(place, peers, memory);
  args.dtype = dtype_of(y, "y");
  args.hidden = y.size(1);
  args.rows = y.size(0);
  args.top_k = slots.top_k;
  args.by_slot = by_slot;
  args.token_offsets = slots.token_offsets;
  int64_t const pool = args.memory.ranks * args.memory.tokens;
  require(slots.tokens == pool, "row_of: expected ", pool, " tokens, got ", slots.tokens);
  require(!slots.lists() || slots.count == args.rows, "row_of: expected ", args.rows,
          " slots as rows in y, got ", slots.count);
  args.y = place.rows(y, "y", args.dtype, {args.rows, args.hidden});
  args.row_of = slots.indices(place, row_of, "row_of");
  if (scores.has_value()) {
    args.scores = slots.packed(place, *scores, "scores", score_dtype(args.dtype));
  }
  args.tokens = place.indices(tokens, "tokens", {args.memory.ranks});
  place.run(cpu::push, cuda::push, args);
}

// token_row (T, ranks), like: of dtype and width, residual (T, H) -> (T, H)
Tensor peer_collect(Tensor const& peers, Numbers memory, Tensor const& token_row,
                    Tensor const& like, MaybeTensor const& residual) {
  Place const place(like, "like");
  require_dims(like, "like", 2);
  require_dims(token_row, "token_row", 2);
  Collect args;
  args.memory = memory_of(place, peers, memory);
  args.dtype = dtype_of(like, "like");
  args.tokens = token_row.size(0);
  args.hidden = like.size(1);
  args.token_row = place.indices(token_row, "token_row", {args.tokens, args.memory.ranks});
  args.residual = place.rows(residual, "residual", args.dtype, {args.tokens, args.hidden});
  Tensor o = place.empty({args.tokens, args.hidden}, args.dtype);
  args.o = o.data_ptr();
  place.run(cpu::collect, cuda::collect, args);
  return o;
}

void peer_push_scores(Tensor const& peers, Numbers memory, Tensor const& ids,
                      Tensor const& scores) {
  Place const place(scores, "scores");
  require_dims(ids, "ids", 2);
  DType const dtype = dtype_of(scores, "scores");
  PushScores args{.memory = memory_of(place, peers, memory),
                  .top_k = ids.size(1),
                  .score_bytes = element_bytes(dtype)};
  int64_t const tokens = args.memory.ranks * args.memory.tokens;
  args.ids = place.indices(ids, "ids", {tokens, args.top_k});
  args.scores = place.packed(scores, "scores", dtype, {tokens, args.top_k});
  place.run(cpu::push_scores, cuda::push_scores, args);
}

}  // namespace

// Some of these ops write to the memory at the addresses in `peers`, of which torch is unaware.
void define_exchange(Library& m) {
  m.def("peer_memory_sizes(int ranks, int[] memory) -> (int, int, int)");
  m.def(
      "peer_publish(Tensor peers, int[] memory, Tensor rows, Tensor? ids, Tensor? scores, int "
      "experts) -> Tensor");
  m.def(
      "peer_meet(Tensor peers, int[] memory, bool published, float seconds, int[] facts, "
      "Tensor(a!) report, Tensor? needed=None, int capacity=0) -> ()");
  m.def(
      "peer_tables(Tensor peers, int[] memory, int top_k, int experts, Tensor like) -> (Tensor "
      "ids, Tensor scores, Tensor tokens)");
  m.def("peer_pull(Tensor peers, int[] memory, Tensor ids, Tensor like) -> Tensor");
  m.def(
      "peer_push(Tensor peers, int[] memory, Tensor y, Tensor row_of, Tensor? scores, Tensor? "
      "token_offsets, Tensor tokens, bool by_slot) -> ()");
  m.def(
      "peer_collect(Tensor peers, int[] memory, Tensor token_row, Tensor like, Tensor? residual) "
      "-> Tensor");
  m.def("peer_push_scores(Tensor peers, int[] memory, Tensor ids, Tensor scores) -> ()");
}

void implement_exchange(Library& m) {
  m.impl("peer_publish", TORCH_BOX(&peer_publish));
  m.impl("peer_meet", TORCH_BOX(&peer_meet));
  m.impl("peer_tables", TORCH_BOX(&peer_tables));
  m.impl("peer_pull", TORCH_BOX(&peer_pull));
  m.impl("peer_push", TORCH_BOX(&peer_push));
  m.impl("peer_collect", TORCH_BOX(&peer_collect));
  m.impl("peer_push_scores", TORCH_BOX(&peer_push_scores));
}

}  // namespace guild::binding
