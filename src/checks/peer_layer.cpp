// Checks of the arguments of a layer over ranks, and of how its steps fit together.
#include "checks/peer_layer.h"

#include "checks/conditions.h"
#include "checks/exchange.h"
#include "shared/dtype.h"

namespace guild {

namespace {

bool same(PeerMemory const& a, PeerMemory const& b) {
  return a.ranks == b.ranks && a.rank == b.rank && a.tokens == b.tokens && a.top_k == b.top_k &&
         a.row_bytes == b.row_bytes && a.returned == b.returned && a.peers == b.peers;
}

template <class... Steps>
void check_memory(PeerMemory const& memory, Steps const&... steps) {
  require((same(memory, steps.memory) && ...), "memory: expected the same in all steps");
}

// Checks a size that a step shares with the layer.
void check_same(int64_t size, int64_t expected, char const* name, char const* of) {
  require(size == expected, name, ": expected ", expected, " (", of, "), got ", size);
}

void check_link(void const* read, void const* written, char const* name, char const* of) {
  require(read == written, name, ": expected the memory of ", of);
}

// The up projection that computes pre-activations again.
void check_again(PeerBackward const& x) {
  MoeBackward const& layer = x.layer;
  UpProjection again = x.again;
  require(again.h.data == nullptr && again.a.data == nullptr,
          "again: expected null h and a because they lie in the workspace");
  again.h = again.a = {layer.workspace};
  check(again);
  Sizes const &a = again.sizes, &s = layer.sizes;
  check_same(a.tokens, s.tokens, "again.sizes.tokens", "tokens of the layer");
  check_same(a.hidden, s.hidden, "again.sizes.hidden", "hidden of the layer");
  check_same(a.intermediate, s.intermediate, "again.sizes.intermediate",
             "intermediate of the layer");
  check_same(a.experts, s.experts, "again.sizes.experts", "experts of the layer");
  check_same(a.rows(), s.rows(), "again.sizes", "rows of the layer");
  require(again.h_rows < 0, "again.h_rows: expected -1, got ", again.h_rows);
  require(again.dtype == layer.dtype, "again.dtype: expected ", name_of(layer.dtype),
          " like the layer, got ", name_of(again.dtype));
  require(again.activation.gated == layer.activation.gated && again.order == layer.order,
          "again.activation: expected a gate, and the order of its half, like the layer's");
  check_size(x.kept_rows, 0, s.rows(), "kept_rows");
  check_pointer(x.again_offsets, x.kept_rows > 0, "again_offsets");
  check_link(again.routing.offsets, layer.routing.offsets, "again.routing.offsets",
             "layer.routing.offsets");
  check_link(again.routing.row_token, layer.routing.row_token, "again.routing.row_token",
             "layer.routing.row_token");
}

void check_barriers(Meet const& published, Meet const& returned) {
  require(published.published, "published.published: expected true since it follows publish");
  require(!returned.published, "returned.published: expected false since it follows push");
}

// The layer runs on the tokens of all ranks, and one row of each token is pulled.
void check_pulled(Pull const& pull, Sizes const& s, DType dtype, ConstRows const& rows,
                  char const* name) {
  require(s.slots < 0, "layer.sizes.slots: expected -1, got ", s.slots);
  check_same(s.tokens, pull.memory.ranks * pull.memory.tokens, "layer.sizes.tokens",
             "ranks * tokens of the memory");
  check_same(pull.top_k, s.top_k, "pull.top_k", "top_k of the layer");
  check_same(pull.row_bytes, s.hidden * element_bytes(dtype), "pull.row_bytes", "a row's");
  require(pull.part == Part::whole, "pull.part: expected 0 (whole), got ", int(pull.part));
  check_link(rows.data, pull.rows, name, "pull.rows");
  require(rows.stride == 0 || rows.stride == s.hidden, name, ": expected packed rows of ", s.hidden,
          ", got stride ", rows.stride);
}

void check_published(Publish const& publish, Pull const& pull) {
  check_same(publish.row_bytes, pull.row_bytes, "publish.row_bytes", "pull.row_bytes");
}

// What is pushed back to the ranks: y, which compose_peer.h fills in, summed by token.
void check_pushed(Push push, Sizes const& s, DType dtype, Routing const& routing,
                  ConstRows const& y) {
  push.y = y;
  check(push);
  require(push.part == Part::whole, "push.part: expected 0 (whole), got ", int(push.part));
  require(push.dtype == dtype, "push.dtype: expected ", name_of(dtype), " like the layer, got ",
          name_of(push.dtype));
  check_same(push.hidden, s.hidden, "push.hidden", "hidden of the layer");
  check_same(push.rows, s.rows(), "push.rows", "rows of the layer");
  check_same(push.top_k, s.top_k, "push.top_k", "top_k of the layer");
  require(!push.by_slot && push.token_offsets == nullptr,
          "push: expected one sum per token of top_k slots (no by_slot, no token_offsets)");
  check_link(push.row_of, routing.slot_row, "push.row_of", "layer.routing.slot_row");
}

void check_collected(Collect const& collect, Publish const& publish, int64_t hidden, DType dtype) {
  check(collect);
  require(collect.dtype == dtype, "collect.dtype: expected ", name_of(dtype),
          " like the layer, got ", name_of(collect.dtype));
  check_same(collect.hidden, hidden, "collect.hidden", "hidden of the layer");
  check_same(collect.tokens, publish.tokens, "collect.tokens", "what is published");
}

// Ids and scores of all ranks' tokens, from publish to the sort.
void check_routed(PeerForward const& x) {
  Sizes const& s = x.layer.sizes;
  int64_t const bytes = element_bytes(score_dtype(x.layer.dtype));
  check_pointer(x.publish.ids, x.publish.tokens > 0, "publish.ids");
  for (int64_t const experts : {x.publish.experts, x.tables.experts}) {
    check_same(experts, s.experts * x.publish.memory.ranks, "experts", "all ranks'");
  }
  for (int64_t const top_k : {x.publish.top_k, x.tables.top_k}) {
    check_same(top_k, s.top_k, "top_k", "top_k of the layer");
  }
  for (int64_t const score_bytes : {x.publish.score_bytes, x.tables.score_bytes}) {
    check_same(score_bytes, bytes, "score_bytes", "of the layer's scores");
  }
  Sort const& sort = *x.layer.sort;
  require(!sort.ids_are_int64, "layer.sort.ids_are_int64: expected false");
  check_link(sort.ids, x.tables.ids, "layer.sort.ids", "tables.ids");
  check_link(sort.scores, x.tables.scores, "layer.sort.scores", "tables.scores");
  check_link(x.pull.ids, x.tables.ids, "pull.ids", "tables.ids");
  check_link(x.push.tokens, x.tables.tokens, "push.tokens", "tables.tokens");
}

}  // namespace

void check(PeerForward const& x) {
  check(x.publish);
  check(x.published);
  check(x.tables);
  check(x.pull);
  check(x.returned);
  check_memory(x.publish.memory, x.published, x.tables, x.pull, x.push, x.returned, x.collect);
  check_barriers(x.published, x.returned);
  MoeForward layer = x.layer;
  layer.o = {x.pull.rows}, layer.residual = {}, layer.residual_scale = nullptr;  // not used
  check(layer);
  check_size(x.kept_rows, -1, layer.sizes.rows(), "kept_rows");
  check_pointer(layer.sort, true, "layer.sort");
  check_pulled(x.pull, layer.sizes, layer.dtype, layer.x, "layer.x");
  check_published(x.publish, x.pull);
  check_routed(x);
  if (layer.sizes.room >= 0) {
    check_link(x.returned.needed, layer.routing.offsets + layer.sizes.experts, "returned.needed",
               "layer.routing.offsets[experts], since layer.sizes has a room");
    check_same(x.returned.capacity, layer.sizes.rows(), "returned.capacity", "rows of the layer");
  }
  check_pushed(x.push, layer.sizes, layer.dtype, layer.routing, {layer.workspace});
  check_collected(x.collect, x.publish, layer.sizes.hidden, layer.dtype);
  check_link(x.collect.token_row, x.publish.token_row, "collect.token_row", "publish.token_row");
  if (x.own.offsets != nullptr) check(x.own);
}

void check(PeerBackward const& x) {
  MoeBackward layer = x.layer;
  bool const again = x.again.x.data != nullptr;
  if (again && x.kept_rows == 0) layer.h = {layer.workspace};  // not used
  Sizes const& s = layer.sizes;
  bool const rows = layer.dx_rows.data != nullptr, scores = layer.dscores != nullptr;
  check(x.publish);
  check(x.published);
  check(x.pull);
  check_memory(x.publish.memory, x.published, x.pull);
  check(layer);
  check_pointer(layer.routing.row_token, s.rows() > 0, "layer.routing.row_token");
  require(layer.dx.data == nullptr, "layer.dx: expected null because dx_rows are pushed");
  require(layer.dh.data == nullptr,
          "layer.dh: expected null because the weight gradients are computed from it here");
  check_pulled(x.pull, s, layer.dtype, layer.dout, "layer.dout");
  check_published(x.publish, x.pull);
  if (again) check_again(x);
  if (rows) {
    check_memory(x.publish.memory, x.push, x.collect);
    check_pushed(x.push, s, layer.dtype, layer.routing, x.push.y);
    check_link(x.push.y.data, layer.dx_rows.data, "push.y", "layer.dx_rows");
    check_collected(x.collect, x.publish, s.hidden, layer.dtype);
  }
  if (scores) {
    check_memory(x.publish.memory, x.scores, x.own_scores);
    check(x.scores);
    check_link(x.scores.scores, layer.dscores, "scores.scores", "layer.dscores");
    check_same(x.scores.top_k, s.top_k, "scores.top_k", "top_k of the layer");
    check_collected(x.own_scores);
    for (int64_t const bytes : {x.scores.score_bytes, x.own_scores.score_bytes}) {
      check_same(bytes, element_bytes(score_dtype(layer.dtype)), "score_bytes",
                 "of the layer's scores");
    }
  }
  if (!rows && !scores) return;
  check(x.returned);
  check_memory(x.publish.memory, x.returned);
  check_barriers(x.published, x.returned);
}

}  // namespace guild
