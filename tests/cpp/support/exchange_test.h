// Ranks all of whose memories lie on one device. Their calls run one after another, so the arrival
// of a rank whose turn is yet to come is written by hand.
#pragma once
#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

#include "device_test.h"
#include "guild/exchange.h"
#include "shared/peer_memory.h"

namespace guild::test {

inline constexpr int64_t kHidden = 2120;  // more columns than a pass of 256 threads takes

class ExchangeTest : public DeviceTest {
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
  void publish();
  Meet meeting(int64_t r, bool published) const;
  void arrive(int64_t from, int64_t at, std::vector<int64_t> const& facts, bool failed = false);

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
  std::vector<Rank> rank_;
  std::vector<Bytes> memory_, report_;
  std::vector<Indices<int64_t>> peers_;
};

inline void ExchangeTest::begin(std::vector<int64_t> const& tokens, DType dtype) {
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

inline void ExchangeTest::publish() {
  for (int64_t r = 0; r < ranks(); ++r) {
    Rank const& own = rank_[r];
    Publish x{memory(r), own.tokens, top_k_, kLocal * ranks(), row_bytes()};
    x.rows = own.x.data(), x.row_stride = own.x.view().stride * bytes_of(dtype_);
    x.ids = own.ids.data(), x.scores = own.scores.data(), x.token_row = own.token_row.data();
    on_cuda() ? cuda::publish(x) : cpu::publish(x);
  }
}

// Writes an arrival as rank `from` would. On a GPU the facts are in the memory of the rank that
// sent it, and may not have come to `at` yet.
inline void ExchangeTest::arrive(int64_t from, int64_t at, std::vector<int64_t> const& facts,
                                 bool failed) {
  PeerControl control;
  device().download(&control, memory_[at].data(), sizeof control);
  PeerMessage message{};
  std::copy(facts.begin(), facts.end(), message.facts);
  message.digest = failed ? 0 : facts_digest(message.facts);
  message.arrived = control.meetings + 1;
  int64_t const place = (message.arrived & 1) * kMostRanks + from;
  int64_t const offset = offsetof(PeerControl, inbox) + place * int64_t(sizeof message);
  for (int64_t const to : {from, at}) {
    if (to == at && on_cuda()) std::fill(std::begin(message.facts), std::end(message.facts), -1);
    device().upload(static_cast<char*>(memory_[to].data()) + offset, &message, sizeof message);
  }
}

inline Meet ExchangeTest::meeting(int64_t r, bool published) const {
  Meet x;
  x.memory = memory(r), x.published = published, x.seconds = 20;
  x.report = static_cast<PeerReport*>(report_[0].data());
  return x;
}

}  // namespace guild::test
