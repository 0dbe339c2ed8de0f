// The composites over ranks on the CPU: src/compose_peer.h, one step after the other. Products are
// divided whatever their sizes, so that tests cover both parts.
#include "checks/peer_layer.h"
#include "compose_peer.h"
#include "guild/cpu.h"

namespace guild::cpu {

namespace {

struct Lines {
  void run(Line, Publish const& x) { publish(x); }
  void run(Line, Meet const& x) { meet(x); }
  void run(Line, Tables const& x, Sort const& sort) {
    tables(x);
    sort_by_expert(sort);
  }
  void run_beside_barrier(Line, Sort const& x) { sort_by_expert(x); }
  void run(Line, Pull const& x, Room) { pull(x); }
  void run(Line, UpProjection const& x, Room) { up_projection(x); }
  void run(Line, DownProjection const& x, Room) { down_projection(x); }
  void run(Line, Push const& x, Room = Room::whole) { push(x); }
  void run(Line, Collect const& x) { collect(x); }
  void run(Line, DownGradient const& x, Room) { down_gradient(x); }
  void run(Line, ScoreGradient const& x) { score_gradient(x); }
  void run(Line, PushScores const& x) { push_scores(x); }
  void run(Line, UpGradient const& x) { up_gradient(x); }
  void run(Line, MoeWeightGradients const& x, Room) { moe_weight_gradients(x); }
  void run(Line, ReturnedScores const& x) { collect_scores(x); }
  void clear(ReturnedScores const& x) { clear_scores(x); }
  void only_beyond(Line, OffsetsBeyond const& x) {
    bool const beyond = x.from[x.experts] > x.rows;
    for (int64_t e = 0; e <= x.experts; ++e) x.to[e] = beyond ? x.from[e] : 0;
  }

  struct Mark {};
  Mark mark(Line) { return {}; }
  template <class Copy>
  Mark run_beside(Line line, Copy const& x) {
    run(line, x, Room::whole);
    return {};
  }
  void wait(Line, Mark) {}
  int64_t first(PeerLoad const& load) const { return (load.experts + 1) / 2; }
  int64_t last(EarlySums const& sums) const { return (sums.load.experts + 1) / 3; }
  void apart(bool) {}
};

}  // namespace

void peer_forward(PeerForward const& x) {
  check(x);
  Lines lines;
  compose_peer_forward(x, lines);
}

void peer_backward(PeerBackward const& x) {
  check(x);
  Lines lines;
  compose_peer_backward(x, lines);
}

}  // namespace guild::cpu
