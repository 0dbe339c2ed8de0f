// The composites over ranks on the GPU: src/compose_peer.h on three streams.
#include <algorithm>
#include <array>
#include <vector>

#include "checks/peer_layer.h"
#include "compose_peer.h"
#include "cuda/device.h"
#include "cuda/exchange/copies.h"
#include "cuda/require_runnable.h"

namespace guild::cuda {

namespace {

// As many SMs as keep a link busy while products run: docs/measured/ranks.md. Pushing takes more,
// since a sum reads several rows for each one that it sends.
constexpr int kPullMultiprocessors = 16, kPushMultiprocessors = 24;

// Events for a call's marks. Later calls on the same thread reuse them: a wait refers to what the
// event had recorded when the wait was issued.
class Events {
 public:
  cudaEvent_t next() {
    int device = 0;
    cuda_check(cudaGetDevice(&device), "current CUDA device");
    if (size_t(device) >= of_device_.size()) of_device_.resize(size_t(device) + 1);
    Ring& ring = of_device_[size_t(device)];
    cudaEvent_t& event = ring.events[ring.next++ % ring.events.size()];
    if (event == nullptr) {
      cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    }
    return event;
  }

 private:
  struct Ring {
    std::array<cudaEvent_t, 32> events{};
    size_t next = 0;
  };
  std::vector<Ring> of_device_;
};

class Lines {
 public:
  Lines(PeerStreams const& streams, Queue const& queue, Counters const& counters)
      : main_(queue), link_(queue), side_(queue), counters_(counters) {
    main_.counters = &counters_;
    has_streams_ = streams.link != nullptr && streams.side != nullptr;
    if (!has_streams_) return;
    link_.stream = streams.link;
    side_.stream = streams.side;
    side_.counter = streams.counter;
    side_.shared = true;
  }
  Lines(Lines const&) = delete;

  void run(Line line, Publish const& x) { publish(x, of(line)); }
  void run(Line line, Meet const& x) { meet(x, of(line)); }
  void run_beside_barrier(Line line, Sort const& x) {
    if (apart_) return sort_by_expert(x, of(line));
    sort_beside(x, main_);
  }
  void run(Line line, Tables const& x, Sort const& sort) {
    if (!apart_) return tables_and_sort(x, sort, main_);
    tables(x, of(line));
    wait(Line::link, mark(line));
    sort_by_expert(sort, of(line));
  }
  void run(Line line, Pull const& x, Room room) { pull(x, of(line, room)); }
  void run(Line line, UpProjection const& x, Room room) { up_projection(x, of(line, room)); }
  void run(Line line, DownProjection const& x, Room room) { down_projection(x, of(line, room)); }
  void run(Line line, Push const& x, Room room) { push(x, of(line, room)); }
  void run(Line line, Collect const& x) { collect(x, of(line)); }
  void run(Line line, DownGradient const& x, Room room) { down_gradient(x, of(line, room)); }
  void run(Line line, ScoreGradient const& x) { score_gradient(x, of(line)); }
  void run(Line line, PushScores const& x) { push_scores(x, of(line)); }
  void run(Line line, UpGradient const& x) { up_gradient(x, of(line)); }
  void run(Line line, MoeWeightGradients const& x, Room room) {
    moe_weight_gradients(x, of(line, room));
  }
  void run(Line line, ReturnedScores const& x) { collect_scores(x, of(line)); }
  void clear(ReturnedScores const& x) { clear_scores(x, main_); }
  void only_beyond(Line line, OffsetsBeyond const& x) { guild::cuda::only_beyond(x, of(line)); }

  struct Mark {
    cudaEvent_t event = nullptr;
  };
  Mark mark(Line line) {
    if (!apart_) return {};
    Mark const mark = next_mark();
    cuda_check(cudaEventRecord(mark.event, of(line).stream), "recording an event");
    return mark;
  }
  Mark run_beside(Line line, Pull const& x) { return run_beside(line, x, kPullMultiprocessors); }
  Mark run_beside(Line line, Push const& x) {
    bool const early = x.part == Part::first;
    return run_beside(line, x, early ? EarlySums::kMultiprocessors : kPushMultiprocessors);
  }
  void wait(Line line, Mark const& mark) {
    if (!apart_) return;
    cuda_check(cudaStreamWaitEvent(of(line).stream, mark.event, 0), "waiting for an event");
  }

  int64_t first(PeerLoad const& load) const {
    return has_streams_ ? first_experts(load) : load.experts;
  }
  int64_t last(EarlySums const& sums) const { return has_streams_ ? last_experts(sums) : 0; }
  void apart(bool apart) { apart_ = apart; }

  // Lets the main stream wait for the others, after whatever error: the memory that their steps
  // use may be free once the call has ended.
  void join() noexcept {
    try {
      wait(Line::main, mark(Line::link));
      wait(Line::main, mark(Line::side));
    } catch (...) {  // the device is lost; the first error counts
    }
  }

 private:
  Queue of(Line line, Room room = Room::whole) const {
    if (!apart_) return main_;
    Queue queue = line == Line::main ? main_ : line == Line::link ? link_ : side_;
    if (room == Room::whole) return queue;
    queue.shared = true;
    if (room == Room::most) {
      int const all = multiprocessors(main_);
      queue.sms = std::max(all - kPullMultiprocessors, (all + 1) / 2);
    }
    return queue;
  }

  template <class Copy>
  Mark run_beside(Line line, Copy const& x, int most) {
    if (!apart_) {
      run(line, x, Room::whole);
      return {};
    }
    Queue queue = of(line);
    queue.sms = std::clamp(multiprocessors(main_) / 2, 1, most);
    Mark const begun = next_mark();
    start(x, queue, begun.event);
    return begun;
  }
  static void start(Pull const& x, Queue const& queue, cudaEvent_t begun) { pull(x, queue, begun); }
  static void start(Push const& x, Queue const& queue, cudaEvent_t begun) { push(x, queue, begun); }

  static Mark next_mark() {
    static thread_local Events events;
    return {events.next()};
  }

  Queue main_, link_, side_;
  bool has_streams_ = false, apart_ = false;
  Counters counters_;  // of the main line's products
};

// Calls require_runnable() in place of the steps.
class Requirements {
 public:
  struct Mark {};
  template <class Step>
  void run(Line, Step const& x, Room = Room::whole) {
    require_runnable(x);
  }
  void run(Line, Tables const& x, Sort const& sort) {
    require_runnable(x);
    require_runnable(sort);
  }
  void run_beside_barrier(Line, Sort const& x) { require_runnable(x); }
  template <class Copy>
  Mark run_beside(Line, Copy const& x) {
    require_runnable(x);
    return {};
  }
  void clear(ReturnedScores const& x) { require_runnable(x); }
  void only_beyond(Line, OffsetsBeyond const&) {}
  Mark mark(Line) { return {}; }
  void wait(Line, Mark) {}
  int64_t first(PeerLoad const& load) const { return load.experts; }
  int64_t last(EarlySums const&) const { return 0; }
  void apart(bool) {}
};

template <class Call>
void compose(Call const& call, Lines& lines) {
  try {
    call(lines);
  } catch (...) {
    lines.join();
    throw;
  }
}

}  // namespace

void peer_forward(PeerForward const& x, Queue queue) {
  check(x);
  auto const composed = [&](auto& lines) { compose_peer_forward(x, lines); };
  Requirements requirements;
  composed(requirements);
  Lines lines(x.streams, queue, {workspace_of(x.layer).counters, kForwardCounters});
  compose(composed, lines);
}

void peer_backward(PeerBackward const& x, Queue queue) {
  check(x);
  auto const composed = [&](auto& lines) { compose_peer_backward(x, lines); };
  Requirements requirements;
  composed(requirements);
  Lines lines(x.streams, queue, {workspace_of(x.layer).memory.counters, kBackwardCounters});
  compose(composed, lines);
}

}  // namespace guild::cuda
