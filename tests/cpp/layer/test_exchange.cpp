// The exchange between ranks: what travels, and where it arrives.
#include <algorithm>
#include <limits>

#include "exchange_test.h"
#include "wrong_call.h"

namespace guild::test {

namespace {

class Exchange : public ExchangeTest {
 protected:
  void expect_there_and_back(std::vector<int64_t> const& tokens, DType dtype);
  void meet(bool published, std::vector<int64_t> const& facts = {});
  void pull();
  void push(bool by_slot);
  void push_in_parts(Push x, Tensor const& y);
  void expect_pulled();
  void expect_collected();
  void expect_slots_back();

  bool in_parts_ = false;  // whether rows are pulled in two parts
};

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
