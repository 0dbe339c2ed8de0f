// Rows between processes that share memory: guild/exchange.h, in plain loops.
//
// A call sees all writes of the calls before it, as a kernel does on a GPU. Other ranks' writes are
// visible after the barrier, whose arrivals are stored with release and loaded with acquire.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "checks/exchange.h"
#include "cpu/blocks.h"
#include "cpu/views.h"
#include "processor.h"
#include "shared/peer_memory.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

using Word = std::atomic_ref<int64_t>;

// Checks a call, and the list of the ranks' memory, which the host can read here.
template <class Args>
void check_call(Args const& x) {
  check(x);
  check_peers(x.memory);
}

bool any_here(int32_t const* ids, int64_t count) {
  return std::any_of(ids, ids + count, [](int32_t id) { return id >= 0; });
}

// Whether this call pulls the row of token p among all ranks' tokens.
bool pulls(Pull const& x, int64_t p) {
  if (x.part == Part::whole) return true;
  int32_t const* const ids = x.ids + p * x.top_k;
  auto const early = [&](int32_t id) { return id >= 0 && id < x.first_experts; };
  bool const own = p / x.memory.tokens == x.memory.rank;
  return (own || std::any_of(ids, ids + x.top_k, early)) == (x.part == Part::first);
}

// The barrier of one rank.
class Meeting {
  using Clock = std::chrono::steady_clock;

 public:
  explicit Meeting(Meet const& x)
      : x_(with_all_facts(x)),
        m_(x_.memory),
        layout_(layout_of(m_)),
        own_(view(m_.rank).control()),
        deadline_(Clock::now() + std::chrono::duration<double>(x.seconds)) {}

  void run() {
    if (own_->stopped == 0) take_part();
    if (own_->stopped != 0) report(Word(own_->failure).load());
  }

 private:
  PeerView view(int64_t rank) const { return {layout_, m_, rank}; }

  void take_part() {
    Word failure(own_->failure);
    int64_t const number = own_->meetings + 1;
    if (x_.needed != nullptr && *x_.needed > x_.capacity) {
      fail(packed(PeerFailure::overflow, m_.rank, m_.rank, 0, *x_.needed));
    }
    arrive(number);  // even after a failure: other ranks may be waiting for this message
    for (int64_t r = 0; r < m_.ranks && failure.load() == 0; ++r) meet(r, number);
    own_->meetings = number;
    own_->published += x_.published;
    own_->stopped = failure.load() != 0;
  }

  void arrive(int64_t number) {
    for (int64_t r = 0; r < m_.ranks; ++r) {
      PeerMessage& message = view(r).control()->inbox[number & 1][m_.rank];
      std::copy_n(x_.facts, kMostFacts, message.facts);
      Word(message.arrived).store(number, std::memory_order_release);
    }
  }

  void meet(int64_t r, int64_t number) {
    PeerMessage& message = own_->inbox[number & 1][r];
    while (Word(message.arrived).load(std::memory_order_acquire) < number) {
      if (Word(own_->failure).load() != 0) return;
      if (Clock::now() > deadline_) {
        return fail(packed(PeerFailure::late, r, m_.rank, 0));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    for (int64_t i = 0; i < kMostFacts; ++i) {
      if (message.facts[i] != x_.facts[i]) {
        return fail(packed(PeerFailure::differs, r, m_.rank, i));
      }
    }
  }

  // Tells all ranks; the first failure counts.
  void fail(int64_t word) {
    for (int64_t r = 0; r < m_.ranks; ++r) {
      int64_t none = 0;
      Word(view(r).control()->failure).compare_exchange_strong(none, word);
    }
  }

  void report(int64_t word) {
    std::memset(view(m_.rank).returned(), 0xff, size_t(layout_.bytes - layout_.returned));
    PeerReport const found = unpacked(word);
    x_.report->rank = found.rank;
    x_.report->reporter = found.reporter;
    x_.report->fact = found.fact;
    x_.report->rows = found.rows;
    Word(x_.report->failure).store(found.failure, std::memory_order_release);
  }

  Meet const x_;
  PeerMemory const& m_;
  PeerLayout const layout_;
  PeerControl* const own_;
  // In double, so that no number of seconds overflows.
  std::chrono::time_point<Clock, std::chrono::duration<double>> const deadline_;
};

bool failed(PeerLayout const& layout, PeerMemory const& m) {
  return Word(PeerView(layout, m, m.rank).control()->failure).load() != 0;
}

// Whether this part of a push sends the sum of these slots' rows.
bool is_of_part(Push const& x, SlotSpan const& slots) {
  if (x.part == Part::whole) return true;
  bool const rest = std::any_of(x.row_of + slots.begin, x.row_of + slots.end,
                                [&](int32_t row) { return row >= *x.rest_from; });
  return rest == (x.part == Part::rest);
}

template <class T>
void push_token(Push const& x, PeerLayout const& layout, int64_t p) {
  using F = Compute<T>;
  PeerMemory const& m = x.memory;
  int64_t const source = p / m.tokens, token = p % m.tokens;
  T* const returned = reinterpret_cast<T*>(PeerView(layout, m, source).returned());
  auto const y = rows_of<T>(x.y, x.hidden);
  auto const slots = slots_of(x.token_offsets, x.rows, x.top_k, p);
  if (x.by_slot) {
    for (int64_t k = 0; k < x.top_k; ++k) {
      int32_t const r = x.row_of[slots.begin + k];
      if (r >= 0 && r < x.rows) {
        std::copy_n(y.row(r), x.hidden, returned + (token * x.top_k + k) * x.hidden);
      }
    }
    return;
  }
  if (!is_of_part(x, slots)) return;
  Scratch scratch;
  F* const sum = scratch.take<F>(x.hidden);
  F* const row = scratch.take<F>(x.hidden);
  std::fill_n(sum, x.hidden, F(0));
  bool any = false;
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
    int32_t const r = x.row_of[slot];
    if (r < 0 || r >= x.rows) continue;
    any = true;
    load(y.row(r), 1, row, x.hidden);
    F const factor = x.scores == nullptr ? F(1) : static_cast<F const*>(x.scores)[slot];
    for (int64_t j = 0; j < x.hidden; ++j) sum[j] += factor * row[j];
  }
  if (any) store(sum, returned + (m.rank * x.tokens[source] + token) * x.hidden, 1, x.hidden);
}

template <class T>
void collect_token(Collect const& x, char const* returned, int64_t token) {
  using F = Compute<T>;
  Scratch scratch;
  F* const sum = scratch.take<F>(x.hidden);
  F* const row = scratch.take<F>(x.hidden);
  std::fill_n(sum, x.hidden, F(0));
  if (x.residual.data != nullptr) {
    load(rows_of<T>(x.residual, x.hidden).row(token), 1, sum, x.hidden);
  }
  for (int64_t r = 0; r < x.memory.ranks; ++r) {
    int32_t const from = x.token_row[token * x.memory.ranks + r];
    if (from < 0) continue;
    load(reinterpret_cast<T const*>(returned) + from * x.hidden, 1, row, x.hidden);
    for (int64_t j = 0; j < x.hidden; ++j) sum[j] += row[j];
  }
  store(sum, static_cast<T*>(x.o) + token * x.hidden, 1, x.hidden);
}

}  // namespace

void publish(Publish const& x) {
  require_processor();
  check_call(x);
  PeerMemory const& m = x.memory;
  PeerLayout const layout = layout_of(m);
  PeerView const own(layout, m, m.rank);
  int64_t const place = next_place(own.control());
  own.control()->tokens[place] = x.tokens;
  for (int64_t t = 0; t < x.tokens; ++t) {
    std::memcpy(own.rows(place) + t * x.row_bytes,
                static_cast<char const*>(x.rows) + t * x.row_stride, size_t(x.row_bytes));
  }
  if (x.ids == nullptr) return;
  int64_t const slots = x.tokens * x.top_k, local = x.experts / m.ranks;
  std::copy_n(x.ids, slots, own.ids(place));
  std::copy_n(static_cast<char const*>(x.scores), slots * x.score_bytes, own.scores(place));
  for (int64_t i = 0; i < x.tokens * m.ranks; ++i) {
    int64_t const t = i / m.ranks, r = i % m.ranks;
    int32_t const* const ids = x.ids + t * x.top_k;
    bool const goes =
        std::any_of(ids, ids + x.top_k, [&](int32_t id) { return lives_on(id, r, local); });
    x.token_row[i] = goes ? int32_t(r * x.tokens + t) : -1;
  }
}

void meet(Meet const& x) {
  require_processor();
  check_call(x);
  Meeting(x).run();
}

void tables(Tables const& x) {
  require_processor();
  check_call(x);
  PeerMemory const& m = x.memory;
  PeerLayout const layout = layout_of(m);
  int64_t const place = last_place(PeerView(layout, m, m.rank).control());
  int64_t const local = x.experts / m.ranks, first = m.rank * local, slots = m.tokens * x.top_k;
  bool const none = failed(layout, m);
  for (int64_t r = 0; r < m.ranks; ++r) {
    PeerView const peer(layout, m, r);
    x.tokens[r] = none ? 0 : int32_t(peer.control()->tokens[place]);
    for (int64_t i = 0; i < slots; ++i) {
      bool const there = i < x.tokens[r] * x.top_k;
      int32_t const id = there ? peer.ids(place)[i] : -1;
      bool const here = there && lives_on(id, m.rank, local);
      x.ids[r * slots + i] = here ? int32_t(id - first) : -1;
      char* const to = static_cast<char*>(x.scores) + (r * slots + i) * x.score_bytes;
      std::memset(to, 0, size_t(x.score_bytes));
      if (here) {
        std::memcpy(to, peer.scores(place) + i * x.score_bytes, size_t(x.score_bytes));
      }
    }
  }
}

void pull(Pull const& x) {
  require_processor();
  check_call(x);
  PeerMemory const& m = x.memory;
  PeerLayout const layout = layout_of(m);
  int64_t const place = last_place(PeerView(layout, m, m.rank).control());
  bool const none = failed(layout, m);
  for (int64_t p = 0; p < m.ranks * m.tokens; ++p) {
    if (!pulls(x, p)) continue;
    char* const to = static_cast<char*>(x.rows) + p * x.row_bytes;
    if (none || !any_here(x.ids + p * x.top_k, x.top_k)) {
      std::memset(to, none ? 0xff : 0, size_t(x.row_bytes));
    } else {
      PeerView const peer(layout, m, p / m.tokens);
      std::memcpy(to, peer.rows(place) + p % m.tokens * x.row_bytes, size_t(x.row_bytes));
    }
  }
}

void push(Push const& x) {
  require_processor();
  check_call(x);
  PeerLayout const layout = layout_of(x.memory);
  if (failed(layout, x.memory)) return;
  int64_t const tokens = x.memory.ranks * x.memory.tokens;
  with_element(x.dtype, [&]<class T>() {
    parallel(tokens, double(tokens * x.hidden), [&](int64_t p) { push_token<T>(x, layout, p); });
  });
}

void collect(Collect const& x) {
  require_processor();
  check_call(x);
  PeerLayout const layout = layout_of(x.memory);
  char const* const returned = PeerView(layout, x.memory, x.memory.rank).returned();
  with_element(x.dtype, [&]<class T>() {
    parallel(x.tokens, double(x.tokens * x.memory.ranks * x.hidden),
             [&](int64_t t) { collect_token<T>(x, returned, t); });
  });
}

void push_scores(PushScores const& x) {
  require_processor();
  check_call(x);
  PeerMemory const& m = x.memory;
  PeerLayout const layout = layout_of(m);
  if (failed(layout, m)) return;
  int64_t const slots = m.tokens * x.top_k;
  for (int64_t i = 0; i < m.ranks * slots; ++i) {
    if (x.ids[i] < 0) continue;
    char* const to = PeerView(layout, m, i / slots).returned_scores();
    std::memcpy(to + i % slots * x.score_bytes,
                static_cast<char const*>(x.scores) + i * x.score_bytes, size_t(x.score_bytes));
  }
}

void clear_scores(ReturnedScores const& x) {
  require_processor();
  check_call(x);
  PeerLayout const layout = layout_of(x.memory);
  if (failed(layout, x.memory)) return;  // they stay NaN
  char* const scores = PeerView(layout, x.memory, x.memory.rank).returned_scores();
  std::memset(scores, 0, size_t(x.slots * x.score_bytes));
}

void collect_scores(ReturnedScores const& x) {
  require_processor();
  check_collected(x);
  check_peers(x.memory);
  PeerLayout const layout = layout_of(x.memory);
  char const* const scores = PeerView(layout, x.memory, x.memory.rank).returned_scores();
  std::copy_n(scores, x.slots * x.score_bytes, static_cast<char*>(x.scores));
}

}  // namespace guild::cpu
