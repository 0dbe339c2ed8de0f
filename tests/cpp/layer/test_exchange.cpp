// The exchange between ranks, all of whose memories lie on one device. Their calls run one after
// another, so the arrival of a rank whose turn is yet to come is written by hand.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>

#include "device_test.h"
#include "guild/exchange.h"
#include "shared/peer_memory.h"
#include "wrong_call.h"

namespace guild::test {

namespace {

constexpr int64_t kHidden = 2120;  // more columns than a pass of 256 threads takes

class Exchange : public DeviceTest {
 protected:
  // What a rank has and what it receives.
  struct Rank {
    int64_t tokens;
    Tensor x, scores;                            // (T, H), (T, K)
    Indices<int32_t> ids, token_row;             // (T, K), (T, ranks)
    Indices<int32_t> local_ids, counts, row_of;  // of the pool: (ranks * Tm, K), (ranks)
    Tensor local_scores, pool, y;                // (ranks * Tm, K), (ranks * Tm, H), (rows, H)
  };

  // Makes the memory of ranks with these numbers of tokens.
  void begin(std::vector<int64_t> const& tokens, DType dtype);
  void expect_there_and_back(std::vector<int64_t> const& tokens, DType dtype);
  void publish();
  void meet(bool published, std::vector<int64_t> const& facts = {});
  Meet meeting(int64_t r, bool published) const;
  void arrive(int64_t from, int64_t at, std::vector<int64_t> const& facts);
  void pull();
  void push(bool by_slot);
  void push_in_parts(Push x, Tensor const& y);
  void expect_pulled();
  void expect_collected();
  void expect_slots_back();
  void expect_stopped(PeerReport const& expected, int64_t rank = 0);

  PeerMemory memory(int64_t r) const {
    auto const peers = reinterpret_cast<void* const*>(peers_[0].data());
    return {ranks(), r, most_, top_k_, row_bytes(), most_back(), peers};
  }
  int64_t ranks() const { return int64_t(rank_.size()); }
  int64_t row_bytes() const { return kHidden * bytes_of(dtype_); }
  int64_t most_back() const { return std::max<int64_t>(int64_t(rank_.size()), top_k_); }
  int64_t slots() const { return ranks() * most_ * top_k_; }

  // Quarters, so small that all sums are exact in every type.
  Tensor random(DType dtype, int64_t rows, int64_t cols, int64_t stride, double unit) {
    int const most = top_k_ > 3 ? 1 : 4;
    std::uniform_int_distribution<int> any(-most, most);
    std::vector<double> values(rows * cols);
    for (double& v : values) v = any(random_) * unit;
    Tensor t(device(), dtype, rows, cols, stride);
    t.set(values);
    return t;
  }
  Indices<int32_t> indices(int64_t count, int64_t high) {
    std::uniform_int_distribution<int64_t> any(-1, high);
    std::vector<int32_t> all(count);
    for (int32_t& i : all) i = int32_t(any(random_));
    return {device(), all};
  }
  template <class T>
  std::vector<T> back(int64_t r, int64_t offset, int64_t count) const {
    std::vector<T> to(count);
    device().download(to.data(), static_cast<char*>(memory_[r].data()) + offset,
                      count * int64_t(sizeof(T)));
    return to;
  }
  void clear_report() { report_[0].write(std::vector<std::byte>(sizeof(PeerReport))); }
  PeerReport report() const {
    PeerReport found;
    device().download(&found, report_[0].data(), sizeof found);
    return found;
  }

  static constexpr int64_t kLocal = 5;  // experts of a rank
  std::mt19937 random_{3};
  DType dtype_ = DType::bfloat16;
  int64_t most_ = 0, top_k_ = 3;
  bool in_parts_ = false;  // whether rows are pulled in two parts
  std::vector<Rank> rank_;
  std::vector<Bytes> memory_, report_;
  std::vector<Indices<int64_t>> peers_;
};

void Exchange::begin(std::vector<int64_t> const& tokens, DType dtype) {
  rank_.clear(), memory_.clear(), report_.clear(), peers_.clear();
  dtype_ = dtype, most_ = *std::max_element(tokens.begin(), tokens.end());
  int64_t const count = int64_t(tokens.size()), places = count * most_;
  for (int64_t const t : tokens) {
    rank_.push_back(
        {t, random(dtype, t, kHidden, kHidden + 8, 1), random(DType::float32, t, top_k_, 0, .25),
         indices(t * top_k_, kLocal * count), Indices<int32_t>(device(), t * count),
         Indices<int32_t>(device(), places * top_k_), Indices<int32_t>(device(), count),
         indices(places * top_k_, places), Tensor(device(), DType::float32, places, top_k_),
         Tensor(device(), dtype, places, kHidden),
         random(dtype, places, kHidden, kHidden + 16, 1)});
  }
  PeerMemory sizes{count, 0, most_, top_k_, row_bytes(), most_back(), nullptr};
  std::vector<int64_t> at;
  for (int64_t r = 0; r < count; ++r) {
    memory_.emplace_back(device(), peer_memory_bytes(sizes));
    memory_[r].write(std::vector<std::byte>(memory_[r].size()));
    at.push_back(int64_t(reinterpret_cast<intptr_t>(memory_[r].data())));
  }
  peers_.emplace_back(device(), at);
  report_.emplace_back(device(), int64_t(sizeof(PeerReport)));
  clear_report();
}

void Exchange::publish() {
  for (int64_t r = 0; r < ranks(); ++r) {
    Rank const& own = rank_[r];
    Publish x{memory(r), own.tokens, top_k_, kLocal * ranks(), row_bytes()};
    x.rows = own.x.data(), x.row_stride = own.x.view().stride * bytes_of(dtype_);
    x.ids = own.ids.data(), x.scores = own.scores.data(), x.token_row = own.token_row.data();
    on_cuda() ? cuda::publish(x) : cpu::publish(x);
  }
}

// Writes an arrival as rank `from` would.
void Exchange::arrive(int64_t from, int64_t at, std::vector<int64_t> const& facts) {
  PeerControl control;
  device().download(&control, memory_[at].data(), sizeof control);
  PeerMessage message{};
  std::copy(facts.begin(), facts.end(), message.facts);
  message.digest = facts_digest(message.facts), message.arrived = control.meetings + 1;
  int64_t const place = (message.arrived & 1) * kMostRanks + from;
  int64_t const offset = offsetof(PeerControl, inbox) + place * int64_t(sizeof message);
  for (int64_t const to : {at, from}) {
    device().upload(static_cast<char*>(memory_[to].data()) + offset, &message, sizeof message);
  }
}

Meet Exchange::meeting(int64_t r, bool published) const {
  Meet x;
  x.memory = memory(r), x.published = published, x.seconds = 20;
  x.report = static_cast<PeerReport*>(report_[0].data());
  return x;
}

void Exchange::meet(bool published, std::vector<int64_t> const& facts) {
  for (int64_t r = 0; r < ranks(); ++r) {
    for (int64_t later = r + 1; later < ranks(); ++later) arrive(later, r, facts);
    Meet x = meeting(r, published);
    x.count = int64_t(facts.size());
    std::copy(facts.begin(), facts.end(), x.facts);
    on_cuda() ? cuda::meet(x) : cpu::meet(x);
  }
}

void Exchange::pull() {
  for (int64_t r = 0; r < ranks(); ++r) {
    Rank const& own = rank_[r];
    Tables const tables{memory(r),
                        top_k_,
                        kLocal * ranks(),
                        4,
                        own.local_ids.data(),
                        own.local_scores.data(),
                        own.counts.data()};
    Pull pull{memory(r), top_k_, row_bytes(), own.local_ids.data(), own.pool.data()};
    on_cuda() ? cuda::tables(tables) : cpu::tables(tables);
    std::vector<Part> parts{Part::whole};
    if (in_parts_) parts = {Part::first, Part::rest}, pull.first_experts = 2;
    for (Part const part : parts) {
      pull.part = part;
      on_cuda() ? cuda::pull(pull) : cpu::pull(pull);
    }
  }
}

// The first part must not read rows of the second: they are NaN by then.
void Exchange::push_in_parts(Push x, Tensor const& y) {
  int64_t const half = x.rows / 2;
  Indices<int32_t> const rest_from(device(), std::vector<int32_t>{int32_t(half)});
  x.rest_from = rest_from.data(), x.part = Part::rest;
  on_cuda() ? cuda::push(x) : cpu::push(x);
  std::vector<double> values = y.get();
  std::fill(values.begin() + half * y.cols(), values.end(),
            std::numeric_limits<double>::quiet_NaN());
  Tensor of_first(device(), dtype_, y.rows(), y.cols(), y.view().stride);
  of_first.set(values);
  x.y = of_first.view(), x.part = Part::first;
  on_cuda() ? cuda::push(x) : cpu::push(x);
}

void Exchange::push(bool by_slot) {
  for (int64_t r = 0; r < ranks(); ++r) {
    Rank const& own = rank_[r];
    Push x{memory(r), dtype_, kHidden, own.y.rows(), top_k_, by_slot, own.y.view()};
    x.row_of = own.row_of.data(), x.tokens = own.counts.data();
    if (!by_slot) x.scores = own.local_scores.data();
    if (by_slot || !in_parts_) {
      on_cuda() ? cuda::push(x) : cpu::push(x);
    } else {
      push_in_parts(x, own.y);
    }
    PushScores const scores{memory(r), top_k_, 4, own.local_ids.data(), own.local_scores.data()};
    if (!by_slot) continue;
    on_cuda() ? cuda::push_scores(scores) : cpu::push_scores(scores);
  }
}

// Whether an id is one of the rank's, and its number there.
bool is_of(int32_t id, int64_t rank, int64_t local) { return id >= 0 && id / local == rank; }

void Exchange::expect_pulled() {
  for (int64_t r = 0; r < ranks(); ++r) {
    Rank const& own = rank_[r];
    auto const ids = own.local_ids.get();
    auto const scores = own.local_scores.get(), pool = own.pool.get();
    std::vector<int32_t> rows(slots(), -1);
    for (int64_t s = 0; s < ranks(); ++s) {
      auto const all = rank_[s].ids.get();
      auto const all_scores = rank_[s].scores.get(), x = rank_[s].x.get();
      for (int64_t t = 0; t < most_; ++t) {
        bool any = false;
        for (int64_t k = 0; k < top_k_; ++k) {
          int64_t const at = (s * most_ + t) * top_k_ + k, i = t * top_k_ + k;
          bool const here = t < rank_[s].tokens && is_of(all[i], r, kLocal);
          EXPECT_EQ(ids[at], here ? int32_t(all[i] - r * kLocal) : -1) << "slot " << at;
          EXPECT_EQ(scores[at], here ? all_scores[i] : 0) << "slot " << at;
          if (here) rows[at] = int32_t(random_() % own.y.rows());
          any |= here;
        }
        auto const row = pool.begin() + (s * most_ + t) * kHidden;
        std::vector<double> const zeros(kHidden);
        auto const expected = any ? x.begin() + t * kHidden : zeros.begin();
        EXPECT_TRUE(std::equal(row, row + kHidden, expected)) << "row " << s << ", " << t;
      }
    }
    rank_[r].row_of.set(rows);  // as the sort gives them
  }
}

void Exchange::expect_collected() {
  for (int64_t s = 0; s < ranks(); ++s) {
    Rank const& own = rank_[s];
    Tensor const residual = random(dtype_, own.tokens, kHidden, kHidden + 8, 1);
    Tensor const o(device(), dtype_, own.tokens, kHidden);
    Collect const x{memory(s),       dtype_,  own.tokens, kHidden, own.token_row.data(),
                    residual.view(), o.data()};
    on_cuda() ? cuda::collect(x) : cpu::collect(x);
    std::vector<double> expected = residual.get();
    for (Rank const& from : rank_) {
      auto const row_of = from.row_of.get();
      auto const scores = from.local_scores.get(), y = from.y.get();
      for (int64_t i = 0; i < own.tokens * top_k_; ++i) {
        int64_t const slot = s * most_ * top_k_ + i;
        for (int64_t j = 0; j < kHidden && row_of[slot] >= 0; ++j) {
          expected[i / top_k_ * kHidden + j] += scores[slot] * y[row_of[slot] * kHidden + j];
        }
      }
    }
    EXPECT_TRUE(o.get() == expected) << "rank " << s;
  }
}

void Exchange::expect_slots_back() {
  PeerLayout const layout = layout_of(memory(0));
  for (int64_t s = 0; s < ranks(); ++s) {
    int64_t const count = rank_[s].tokens * top_k_, bytes = bytes_of(dtype_);
    auto const rows = back<std::byte>(s, layout.returned, count * row_bytes());
    auto const scores = back<float>(s, layout.returned_scores, count);
    for (Rank const& from : rank_) {
      auto const row_of = from.row_of.get();
      auto const y = from.y.get(), sent = from.local_scores.get();
      for (int64_t i = 0; i < count; ++i) {
        int64_t const slot = s * most_ * top_k_ + i;
        if (row_of[slot] < 0) continue;
        EXPECT_EQ(scores[i], sent[slot]) << "slot " << i;
        for (int64_t j = 0; j < kHidden; ++j) {
          ASSERT_EQ(decode(dtype_, &rows[(i * kHidden + j) * bytes]), y[row_of[slot] * kHidden + j])
              << "slot " << i << ", column " << j;
        }
      }
    }
  }
}

void Exchange::expect_there_and_back(std::vector<int64_t> const& tokens, DType dtype) {
  SCOPED_TRACE(text_of(tokens.size(), " ranks, dtype ", int(dtype), ", top_k ", top_k_));
  begin(tokens, dtype);
  for (auto const& [by_slot, in_parts] :
       {std::pair{false, false}, {true, true}, {false, true}, {false, false}}) {
    in_parts_ = in_parts;
    for (Rank& own : rank_) own.pool.set(std::vector<double>(own.y.rows() * kHidden, 77.));
    publish();
    meet(true, {top_k_, kHidden});
    pull();
    expect_pulled();
    push(by_slot);
    meet(false);
    by_slot ? expect_slots_back() : expect_collected();
  }
  for (Bytes const& memory : memory_) EXPECT_TRUE(memory.canaries_alive());
  EXPECT_EQ(report().failure, 0);
}

TEST_P(Exchange, BringsRowsAndTakesResultsBack) {
  for (std::vector<int64_t> const& tokens :
       std::vector<std::vector<int64_t>>{{7}, {5, 9}, {33, 0, 12}}) {
    for (DType const dtype : {DType::bfloat16, DType::float16}) {
      expect_there_and_back(tokens, dtype);
    }
  }
}

// Sums of more rows than are copied at a time, and of more slots than a warp has lanes.
TEST_P(Exchange, AddsManyRows) {
  for (int64_t const top_k : {12, 32, 41}) {
    top_k_ = top_k;
    expect_there_and_back({60, 33}, DType::bfloat16);
  }
}

// Everything that came back to the rank must be NaN, and so must everything pulled from now on.
void Exchange::expect_stopped(PeerReport const& expected, int64_t rank) {
  PeerReport const found = report();
  EXPECT_EQ(found.failure, expected.failure);
  EXPECT_EQ(found.rank, expected.rank);
  EXPECT_EQ(found.reporter, expected.reporter);
  EXPECT_EQ(found.fact, expected.fact);
  if (expected.rows > 0) {
    EXPECT_EQ(found.rows, expected.rows);
  }
  PeerLayout const layout = layout_of(memory(0));
  int64_t const words = (layout.bytes - layout.returned) / 4;
  for (int32_t const word : back<int32_t>(rank, layout.returned, words)) ASSERT_EQ(word, -1);
  EXPECT_TRUE(memory_[rank].canaries_alive());
}

TEST_P(Exchange, SaysWhyRanksCannotGoOn) {
  auto const fails = [&](PeerFailure failure, PeerReport expected, auto&& spoil) {
    begin({3, 4}, DType::bfloat16);
    publish();
    Meet x = meeting(0, true);
    x.count = 2, x.facts[1] = 5;
    Indices<int32_t> const needed(device(), std::vector<int32_t>{11});
    x.needed = needed.data(), x.capacity = 11;
    spoil(x);
    expected.failure = int64_t(failure);
    for (int i = 0; i < 3; ++i) {  // later barriers say so again, whatever they are told
      SCOPED_TRACE(text_of("barrier ", i));
      clear_report();
      on_cuda() ? cuda::meet(x) : cpu::meet(x);
      expect_stopped(expected);
      x.facts[1] = 7, x.capacity = 0;
    }
  };
  fails(PeerFailure::differs, {0, 1, 0, 1, 0}, [&](Meet&) { arrive(1, 0, {0, 6}); });
  fails(PeerFailure::late, {0, 1, 0, 0, 0}, [&](Meet& x) { x.seconds = 1e-3; });
  fails(PeerFailure::overflow, {0, 0, 0, 0, 11}, [&](Meet& x) {
    arrive(1, 0, {0, 5});
    x.capacity = 10;
  });
}

// The ranks that have room learn too how many rows the one without it needed.
TEST_P(Exchange, TellsAllRanksHowManyRowsWereNeeded) {
  for (int32_t const rows : {11, std::numeric_limits<int32_t>::max()}) {
    begin({3, 4, 2}, DType::bfloat16);
    publish();
    Indices<int32_t> const needed(device(), std::vector<int32_t>{rows});
    arrive(1, 0, {});
    arrive(2, 0, {});
    for (int64_t r = 0; r < ranks(); ++r) {
      SCOPED_TRACE(text_of("rank ", r, ", ", rows, " rows"));
      clear_report();
      Meet x = meeting(r, true);
      x.needed = needed.data(), x.capacity = r == 0 ? rows - 1 : rows;
      on_cuda() ? cuda::meet(x) : cpu::meet(x);
      expect_stopped({int64_t(PeerFailure::overflow), 0, 0, 0, rows}, r);
    }
  }
}

TEST_P(Exchange, HasNoScoresWithoutSlots) {
  begin({0, 4}, DType::bfloat16);
  ReturnedScores const x{memory(0), 0, 4, nullptr};
  on_cuda() ? cuda::clear_scores(x) : cpu::clear_scores(x);
  on_cuda() ? cuda::collect_scores(x) : cpu::collect_scores(x);
  for (Bytes const& memory : memory_) EXPECT_TRUE(memory.canaries_alive());
}

GUILD_DEVICE_TESTS(Exchange);

}  // namespace

}  // namespace guild::test
