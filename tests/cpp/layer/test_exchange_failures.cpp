// Barriers in which ranks find out that they cannot go on, and why.
#include <limits>

#include "exchange_test.h"
#include "wrong_call.h"

namespace guild::test {

namespace {

class ExchangeFailures : public ExchangeTest {
 protected:
  void expect_stopped(PeerReport const& expected, int64_t rank = 0);
};

// Everything that came back to the rank must be NaN, and so must everything pulled from now on.
void ExchangeFailures::expect_stopped(PeerReport const& expected, int64_t rank) {
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

TEST_P(ExchangeFailures, SaysWhyRanksCannotGoOn) {
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
TEST_P(ExchangeFailures, TellsAllRanksHowManyRowsWereNeeded) {
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

// What a rank that has failed says, where the failure itself has not come yet.
TEST_P(ExchangeFailures, PassesOnWhatAnotherRankHasFound) {
  if (!on_cuda()) GTEST_SKIP() << "on the CPU arrivals do not say whether a rank has failed";
  begin({3, 4, 2}, DType::bfloat16);
  publish();
  PeerControl control{};
  control.failure = packed(PeerFailure::late, 2, 1, 0);
  device().upload(memory_[1].data(), &control, offsetof(PeerControl, inbox));
  arrive(1, 0, {}, /*failed=*/true);
  arrive(2, 0, {});
  clear_report();
  cuda::meet(meeting(0, true));
  expect_stopped({int64_t(PeerFailure::late), 2, 1, 0, 0});
}

// Facts beyond the number of those given count as 0.
TEST_P(ExchangeFailures, ComparesFactsOfRanksThatGiveFewer) {
  for (int64_t const fact : {0, 5}) {
    begin({3, 4}, DType::bfloat16);
    publish();
    arrive(1, 0, {7, fact});
    clear_report();
    Meet x = meeting(0, true);
    x.count = 1, x.facts[0] = 7, x.facts[1] = 9;
    on_cuda() ? cuda::meet(x) : cpu::meet(x);
    if (fact == 0) {
      EXPECT_EQ(report().failure, int64_t(PeerFailure::none));
    } else {
      expect_stopped({int64_t(PeerFailure::differs), 1, 0, 1, 0});
    }
  }
}

GUILD_DEVICE_TESTS(ExchangeFailures);

}  // namespace

}  // namespace guild::test
