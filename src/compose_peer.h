// The composites of guild/peer_layer.h: which step runs on which line (a stream, on a GPU), and the
// dependencies between lines.
//
// Shared by both backends. Lines has
//
//   run(line, step[, room])  enqueues a step on the line
//   run(line, tables, sort)  enqueues both; the link line waits for the tables
//   run_beside_barrier(line, sort)
//                            enqueues a sort that need not wait for the main line's last barrier
//   run_beside(line, copy)   enqueues a copy that uses few SMs; returns a mark of its start
//   clear(scores)            clears this rank's returned scores, on the main line
//   only_beyond(line, args)  computes the offsets for recomputing H (OffsetsBeyond)
//   mark(line)               returns a mark (an event) after all steps enqueued on the line so far
//   wait(line, mark)         makes steps enqueued on the line from now on wait for the mark
//   first(load)              how many experts' rows are pulled and multiplied first, while the
//                            other experts' rows are transferred; all experts: no split
//   last(sums)               how many experts are multiplied last, while the sums of tokens that
//                            have none of them are pushed; 0: no split
//   apart(bool)              whether lines are separate streams, or all of them the main one
#pragma once
#include "compose.h"
#include "guild/peer_layer.h"
#include "shared/peer_overlap.h"
#include "shared/row_stride.h"

namespace guild {

enum class Line : int { main, link, side };

// The SMs that a step may use. whole: all, since nothing else runs; shared: all that concurrent
// kernels leave free at any time; most: as shared, except those that a pull takes.
enum class Room : int { whole, shared, most };

// to[e] = from[e] if from[experts] > rows, else 0, which leaves no expert any rows.
struct OffsetsBeyond {
  int64_t experts = 0, rows = 0;
  int32_t const* from = nullptr;  // (experts + 1)
  int32_t* to = nullptr;          // (experts + 1)
};

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
  if (b.data == nullptr) return b;
  b.data = static_cast<char const*>(b.data) + first * row_stride(b, width) * element;
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
inline DownProjection of_experts(DownProjection x, int64_t first, int64_t count) {
  int64_t const element = element_bytes(x.dtype);
  x.sizes.experts = count;
  x.routing.offsets += first;
  x.w_down = from_expert(x.w_down, first, element);
  x.bias = from_expert(x.bias, first, x.sizes.hidden, element);
  return x;
}
inline DownGradient of_experts(DownGradient x, int64_t first, int64_t count) {
  x.sizes.experts = count;
  x.routing.offsets += first;
  x.w_down = from_expert(x.w_down, first, element_bytes(x.dtype));
  return x;
}

inline Pull part_of(Pull x, Part part, int64_t first) {
  x.part = part;
  x.first_experts = first;
  return x;
}
inline Push part_of(Push x, Part part) {
  x.part = part;
  return x;
}
inline PeerLoad load_of(PeerMemory const& memory, Sizes const& s, DType dtype) {
  return {.ranks = memory.ranks,
          .tokens = memory.tokens,
          .experts = s.experts,
          .top_k = s.top_k,
          .row_bytes = s.hidden * element_bytes(dtype),
          .inner = s.hidden};
}

inline UpProjection after_pull(UpProjection x) {
  x.after_pull = true;
  return x;
}
inline DownGradient const& after_pull(DownGradient const& x) { return x; }

// Pulls the rows that `step` needs, then runs it. The link line already waits for the main one.
// after_side: whether the step also depends on the steps of the side line.
template <class Lines, class Step>
void pull_and_run(Lines& lines, Pull const& pull, Step const& step, int64_t first,
                  bool after_side = false) {
  int64_t const experts = step.sizes.experts;
  auto const ready = after_side ? lines.mark(Line::side) : typename Lines::Mark{};
  if (first == experts) {
    lines.run(Line::main, pull, Room::whole);
    if (after_side) lines.wait(Line::main, ready);
    return lines.run(Line::main, after_pull(step), Room::whole);
  }
  lines.run(Line::link, part_of(pull, Part::first, first), Room::whole);
  auto const arrived = lines.mark(Line::link);
  auto const begun = lines.run_beside(Line::link, part_of(pull, Part::rest, first));
  lines.wait(Line::side, lines.mark(Line::main));
  lines.wait(Line::side, lines.mark(Line::link));
  lines.wait(Line::main, arrived);
  lines.wait(Line::main, begun);  // else the product could occupy all multiprocessors
  if (after_side) lines.wait(Line::main, ready);
  lines.run(Line::main, of_experts(step, 0, first), Room::shared);
  lines.run(Line::side, of_experts(step, first, experts - first), Room::shared);
  lines.wait(Line::main, lines.mark(Line::side));
}

template <class Lines>
void compose_peer_forward(PeerForward const& f, Lines& lines) {
  MoeForward const& layer = f.layer;
  ForwardWorkspace const w = workspace_of(layer);
  PeerLoad load = load_of(f.push.memory, layer.sizes, layer.dtype);
  load.columns = layer.sizes.intermediate * (layer.activation.gated ? 2 : 1);
  int64_t const experts = layer.sizes.experts, first = lines.first(load);
  int64_t last = lines.last({load, layer.sizes.intermediate});
  if (first < experts) last = std::min(last, experts - first - 1);  // the others are divided too
  lines.apart(first < experts || last > 0);
  lines.run(Line::main, f.publish);
  lines.wait(Line::side, lines.mark(Line::main));
  lines.run(Line::main, f.published);
  if (f.own.offsets != nullptr) lines.run_beside_barrier(Line::side, f.own);
  lines.run(Line::main, f.tables, *layer.sort);
  UpProjection up = up_projection_of(layer, {w.a});
  up.h_rows = f.kept_rows;
  DownProjection const down = down_projection_of(layer, {w.a}, {w.y});
  Push push = f.push;
  push.y = {w.y};
  if (last == 0) {
    pull_and_run(lines, f.pull, up, first);
    lines.run(Line::main, down, Room::whole);
    lines.run(Line::main, push, Room::whole);
  } else {
    int64_t const others = experts - last;
    pull_and_run(lines, f.pull, of_experts(up, 0, others), std::min(first, others));
    lines.run(Line::main, of_experts(down, 0, others), Room::whole);
    lines.wait(Line::link, lines.mark(Line::main));
    push.rest_from = layer.routing.offsets + others;
    lines.wait(Line::main, lines.run_beside(Line::link, part_of(push, Part::first)));
    lines.run(Line::main, of_experts(up, others, last), Room::shared);
    lines.run(Line::main, of_experts(down, others, last), Room::shared);
    lines.run(Line::main, part_of(push, Part::rest), Room::whole);
    lines.wait(Line::main, lines.mark(Line::link));
  }
  lines.run(Line::main, f.returned);
  lines.run(Line::main, f.collect);
  lines.wait(Line::main, lines.mark(Line::side));  // at least for the sort of own tokens
}

constexpr bool recomputes(PeerBackward const& b) {
  return b.again.x.data != nullptr && b.kept_rows == 0;
}
constexpr bool may_recompute(PeerBackward const& b) {
  return b.again.x.data != nullptr && b.kept_rows > 0;
}

// Recomputes H on the side line if forward could not keep it.
template <class Lines>
void recompute_beyond(PeerBackward const& b, UpProjection again, Lines& lines) {
  OffsetsBeyond const beyond{.experts = again.sizes.experts,
                             .rows = b.kept_rows,
                             .from = again.routing.offsets,
                             .to = b.again_offsets};
  lines.wait(Line::side, lines.mark(Line::main));
  lines.only_beyond(Line::side, beyond);
  again.routing.offsets = b.again_offsets;
  lines.run(Line::side, again, Room::most);
}

// Pulls the rows of dO, and computes dH, A' and the parts of dS from them.
template <class Lines>
void run_down_gradient(PeerBackward const& b, BackwardWorkspace const& w, UpProjection const& again,
                       int64_t first, Lines& lines) {
  MoeBackward const& layer = b.layer;
  DownGradient down = down_gradient_of(layer, {w.dh}, {w.a_scaled}, w);
  if (recomputes(b)) {  // while all rows arrive
    down.h = {w.dh};
    lines.wait(Line::main, lines.run_beside(Line::link, b.pull));
    lines.run(Line::main, again, Room::shared);
    lines.wait(Line::main, lines.mark(Line::link));
    return lines.run(Line::main, down, Room::whole);
  }
  if (may_recompute(b)) {
    down.h_again = {w.dh};
    down.h_rows = b.kept_rows;
    down.needed = layer.routing.offsets + layer.sizes.experts;
  }
  // Bias gradients are summed in memory that two concurrent products would share.
  int64_t const divided = wants_biases(layer) ? layer.sizes.experts : first;
  pull_and_run(lines, b.pull, down, divided, may_recompute(b));
}

template <class Lines>
void compose_peer_backward(PeerBackward const& b, Lines& lines) {
  MoeBackward const& layer = b.layer;
  BackwardWorkspace const w = workspace_of(layer);
  bool const rows = layer.dx_rows.data != nullptr, scores = layer.dscores != nullptr;
  PeerLoad load = load_of(b.pull.memory, layer.sizes, layer.dtype);
  load.columns = layer.sizes.intermediate;
  int64_t const first = lines.first(load);
  lines.apart(first < layer.sizes.experts);
  lines.run(Line::main, b.publish);
  UpProjection again = b.again;
  again.h = {w.dh}, again.a = {w.a_scaled};  // dH is stored there after H has been read
  if (may_recompute(b)) recompute_beyond(b, again, lines);
  if (scores) lines.clear(b.own_scores);
  lines.run(Line::main, b.published);
  lines.wait(Line::link, lines.mark(Line::main));
  run_down_gradient(b, w, again, first, lines);
  if (scores) {
    lines.run(Line::main, score_gradient_of(layer, w));
    lines.run(Line::main, b.scores);
  }
  MoeWeightGradients weights = weight_gradients_of(layer, {w.dh}, {w.a_scaled});
  weights.workspace = w.memory.schedule.order;  // laid out like this part of w
  bool const wanted = weights.dw_up.gate.data != nullptr || weights.dw_down.data != nullptr;
  if (rows) {
    lines.run(Line::main, up_gradient_of(layer, {w.dh}, layer.dx_rows));
    lines.wait(Line::link, lines.mark(Line::main));
    if (wanted) {
      lines.wait(Line::main, lines.run_beside(Line::link, b.push));
    } else {
      lines.run(Line::link, b.push, Room::whole);
    }
    lines.run(Line::link, b.returned);
    lines.run(Line::link, b.collect);
  }
  if (wanted) lines.run(Line::main, weights, rows ? Room::shared : Room::whole);
  lines.wait(Line::main, lines.mark(Line::link));
  if (scores && !rows) lines.run(Line::main, b.returned);
  if (scores) lines.run(Line::main, b.own_scores);
}

}  // namespace guild
