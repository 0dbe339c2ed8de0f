// The composites of guild/peer_layer.h: which steps run on which line, and what waits for what.
//
// Written once for both backends. Lines has
//
//   run(line, step, room)   starts a step behind what the line has
//   run_beside(line, copy)  the same on a few multiprocessors; gives the mark of its beginning
//   there mark(line), wait(line, mark)   what a line starts from now on comes after the mark
//   await(line, pull, turn)   and this after the rows of a turn
//   turns(load)             in which rows arrive; one: the product is not divided
//   apart(bool)             whether lines are streams of their own, or all are the main one
#pragma once
#include "compose.h"
#include "guild/peer_layer.h"
#include "shared/peer_overlap.h"

namespace guild {

enum class Line : int { main, link, side };

// Multiprocessors that a step fills: all, while nothing else runs; all that others leave free, now
// and later; or all but those of a pull, so that no block of it waits for one: `left`, or `idle`
// where nothing else runs on them.
enum class Room : int { whole, shared, left, idle };

// A weight's or a bias's experts from `first` on.
inline ConstWeight from_expert(ConstWeight w, int64_t first, int64_t element) {
  if (w.expert_at != nullptr) {
    w.expert_at += first;
  } else if (w.data != nullptr) {
    w.data = static_cast<char const*>(w.data) + first * w.expert_stride * element;
  }
  return w;
}
inline ConstRows from_expert(ConstRows b, int64_t first, int64_t width, int64_t element) {
  int64_t const stride = b.stride == 0 ? width : b.stride;
  if (b.data != nullptr) b.data = static_cast<char const*>(b.data) + first * stride * element;
  return b;
}

// A step for `count` experts from `first` on.
inline UpProjection of_experts(UpProjection x, int64_t first, int64_t count) {
  int64_t const element = element_bytes(x.dtype);
  x.sizes.experts = count;
  x.routing.offsets += first;
  x.w_up = {from_expert(x.w_up.gate, first, element), from_expert(x.w_up.up, first, element)};
  int64_t const width = x.sizes.intermediate * (x.activation.gated ? 2 : 1);
  x.bias = from_expert(x.bias, first, width, element);
  return x;
}
inline DownGradient of_experts(DownGradient x, int64_t first, int64_t count) {
  x.sizes.experts = count;
  x.routing.offsets += first;
  x.w_down = from_expert(x.w_down, first, element_bytes(x.dtype));
  return x;
}

inline OwnRows own_rows_of(Publish const& x, Pull const& pull) {
  return {.memory = x.memory,
          .tokens = x.tokens,
          .row_bytes = x.row_bytes,
          .from = x.rows,
          .row_stride = x.row_stride,
          .rows = pull.rows};
}
inline PeerLoad load_of(PeerMemory const& memory, Sizes const& s, DType dtype) {
  return {.ranks = memory.ranks,
          .tokens = memory.tokens,
          .experts = s.experts,
          .top_k = s.top_k,
          .row_bytes = s.hidden * element_bytes(dtype),
          .inner = s.hidden};
}

// What publish() sends, and where the product that needs it is divided, this rank's own rows to
// their place, while ranks wait for each other.
template <class Lines>
void publish_and_keep(Lines& lines, Publish const& publish, Pull const& pull,
                      PeerTurns const& turns) {
  lines.run(Line::main, publish);
  if (turns.count == 1) return;
  lines.wait(Line::side, lines.mark(Line::main));
  lines.run(Line::side, own_rows_of(publish, pull));
}

// Rows to where `step` needs them, and the step for the experts of a turn as soon as they are
// there, on two lines, so that the next begins while the last tiles of one are computed. The link's
// line begins where the main one is; own rows are on the side's.
template <class Lines, class Step>
void pull_and_run(Lines& lines, Pull const& pull, Step const& step, PeerTurns const& turns) {
  if (turns.count == 1) {
    lines.run(Line::main, pull, Room::whole);
    return lines.run(Line::main, step, Room::whole);
  }
  Pull others = pull;
  others.others = true;
  others.turns = turns;
  auto const begun = lines.run_beside(Line::link, others);
  auto const own = lines.mark(Line::side);
  lines.wait(Line::side, lines.mark(Line::main));
  for (Line const line : {Line::main, Line::side}) {
    lines.wait(line, own);
    lines.wait(line, begun);  // else products could keep all multiprocessors
  }
  int64_t from = 0;
  for (int turn = 0; turn < turns.count; ++turn) {
    bool const last = turn + 1 == turns.count;
    int64_t const until = last ? step.sizes.experts : turns.until[turn];
    Line const line = turn % 2 == 0 ? Line::main : Line::side;
    Room const room = last ? Room::shared : turn == 0 ? Room::idle : Room::left;
    lines.await(line, others, turn);
    lines.run(line, of_experts(step, from, until - from), room);
    from = until;
  }
  lines.wait(Line::main, lines.mark(Line::link));
  lines.wait(Line::main, lines.mark(Line::side));
}

template <class Lines>
void compose_peer_forward(PeerForward const& f, Lines& lines) {
  MoeForward const& layer = f.layer;
  ForwardWorkspace const w = workspace_of(layer);
  PeerLoad load = load_of(f.push.memory, layer.sizes, layer.dtype);
  load.columns = layer.sizes.intermediate * (layer.activation.gated ? 2 : 1);
  PeerTurns const turns = lines.turns(load);
  lines.apart(turns.count > 1);
  lines.clear(f.pull);
  publish_and_keep(lines, f.publish, f.pull, turns);
  if (f.own.offsets != nullptr) {
    lines.wait(Line::side, lines.mark(Line::main));
    lines.run(Line::side, f.own);
  }
  lines.run(Line::main, f.published);
  lines.run(Line::main, f.tables);
  lines.wait(Line::link, lines.mark(Line::main));
  lines.run(Line::main, *layer.sort);
  pull_and_run(lines, f.pull, up_projection_of(layer, {w.a}), turns);
  lines.run(Line::main, down_projection_of(layer, {w.a}, {w.y}), Room::whole);
  Push push = f.push;
  push.y = {w.y};
  lines.run(Line::main, push, Room::whole);
  lines.run(Line::main, f.returned);
  lines.run(Line::main, f.collect);
  lines.wait(Line::main, lines.mark(Line::side));  // the sort of own tokens at least
}

// dH, A' and the parts of dS, with the rows of dO that they are made of.
template <class Lines>
void run_down_gradient(PeerBackward const& b, BackwardWorkspace const& w, PeerTurns const& turns,
                       Lines& lines) {
  MoeBackward const& layer = b.layer;
  DownGradient const down = down_gradient_of(layer, {w.dh}, {w.a_scaled}, w);
  if (b.again.h.data != nullptr) {  // while which all rows arrive
    UpProjection again = b.again;
    again.a = {w.a_scaled};  // not in use yet
    lines.wait(Line::main, lines.run_beside(Line::link, b.pull));
    lines.run(Line::main, again, Room::shared);
    lines.wait(Line::main, lines.mark(Line::link));
    return lines.run(Line::main, down, Room::whole);
  }
  pull_and_run(lines, b.pull, down, turns);
}

template <class Lines>
void compose_peer_backward(PeerBackward const& b, Lines& lines) {
  MoeBackward const& layer = b.layer;
  BackwardWorkspace const w = workspace_of(layer);
  bool const rows = layer.dx_rows.data != nullptr, scores = layer.dscores != nullptr;
  PeerLoad load = load_of(b.pull.memory, layer.sizes, layer.dtype);
  load.columns = layer.sizes.intermediate;
  PeerTurns turns = lines.turns(load);
  lines.apart(turns.count > 1);
  // Gradients of biases are summed in memory that products at the same time would share.
  if (b.again.h.data != nullptr || wants_biases(layer)) turns = {};
  lines.clear(b.pull);
  publish_and_keep(lines, b.publish, b.pull, turns);
  if (scores) lines.clear(b.own_scores);
  lines.run(Line::main, b.published);
  lines.wait(Line::link, lines.mark(Line::main));
  run_down_gradient(b, w, turns, lines);
  if (scores) {
    lines.run(Line::main, score_gradient_of(layer, w));
    lines.run(Line::main, b.scores);
  }
  MoeWeightGradients up = weight_gradients_of(layer, {w.dh}, {w.a_scaled}), down = up;
  up.workspace = down.workspace = w.memory.schedule.order;  // whose layout is that of this part
  up.dw_down = {}, down.dw_up = {};
  bool const wants_up = up.dw_up.gate.data != nullptr, wants_down = down.dw_down.data != nullptr;
  if (rows) {
    lines.run(Line::main, up_gradient_of(layer, {w.dh}, layer.dx_rows));
    lines.wait(Line::link, lines.mark(Line::main));
    if (wants_up || wants_down) {
      lines.wait(Line::main, lines.run_beside(Line::link, b.push));
    } else {
      lines.run(Line::link, b.push, Room::whole);
    }
  }
  if (wants_down) lines.run(Line::main, down, rows ? Room::shared : Room::whole);
  if (wants_up) lines.run(Line::main, up, rows && !wants_down ? Room::shared : Room::whole);
  lines.wait(Line::main, lines.mark(Line::link));
  if (!rows && !scores) return;
  lines.run(Line::main, b.returned);
  if (rows) lines.run(Line::main, b.collect);
  if (scores) lines.run(Line::main, b.own_scores);
}

}  // namespace guild
