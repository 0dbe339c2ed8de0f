// How a layer over ranks divides its products: src/shared/peer_overlap.h.
#include <gtest/gtest.h>

#include "shared/peer_overlap.h"

namespace guild::test {

namespace {

// Of two ranks with 8,192 tokens each: DeepSeek-V3, gpt-oss, Qwen3-30B; their up projections.
PeerLoad const kDsv3{.ranks = 2,
                     .tokens = 8192,
                     .experts = 128,
                     .top_k = 8,
                     .row_bytes = 14336,
                     .inner = 7168,
                     .columns = 4096};
PeerLoad const kGptoss{.ranks = 2,
                       .tokens = 8192,
                       .experts = 64,
                       .top_k = 4,
                       .row_bytes = 5760,
                       .inner = 2880,
                       .columns = 5760};
PeerLoad const kQwen{.ranks = 2,
                     .tokens = 8192,
                     .experts = 64,
                     .top_k = 8,
                     .row_bytes = 4096,
                     .inner = 2048,
                     .columns = 1536};

TEST(PeerOverlap, SharesOfTokens) {
  EXPECT_EQ(kQwen.share(0), 0);
  EXPECT_NEAR(kQwen.share(64), 1 - 1. / 256, 1e-12);  // half of all experts, 8 choices
  PeerLoad const alone{.ranks = 1, .experts = 8, .top_k = 3};
  EXPECT_EQ(alone.share(8), 1);
  EXPECT_EQ(alone.travel(8), 0);
}

// Microseconds until all products are done, each as soon as the one before and its rows are.
double end_of(PeerLoad const& load, PeerTurns const& turns) {
  double end = 0;
  int64_t from = 0;
  for (int turn = 0; turn < turns.count; ++turn) {
    int64_t const until = turn + 1 < turns.count ? turns.until[turn] : load.experts;
    end = std::max(end, load.travel(until)) + load.product(until - from);
    from = until;
  }
  return end;
}

TEST(PeerOverlap, LargeProductsHideMostOfTheWay) {
  for (PeerLoad const& load : {kDsv3, kGptoss, kQwen}) {
    PeerTurns const turns = turns_of(load);
    ASSERT_EQ(turns.count, kMostTurns);
    EXPECT_GT(turns.until[0], 0);
    EXPECT_GT(turns.until[1], turns.until[0]);
    EXPECT_LT(turns.until[1], load.experts / 2);
    double const whole = load.travel(load.experts), products = load.product(load.experts);
    EXPECT_LT(end_of(load, turns), products + whole / 4);
    for (int64_t first = 1; first < load.experts; ++first) {
      PeerTurns const two{.count = 2, .until = {first}};
      EXPECT_LT(end_of(load, turns), end_of(load, two)) << first;
    }
  }
}

TEST(PeerOverlap, SmallProductsStayWhole) {
  PeerLoad few = kQwen;
  few.tokens = 64;
  EXPECT_EQ(turns_of(few).count, 1);
  PeerLoad one = kDsv3;
  one.experts = 1;
  EXPECT_EQ(turns_of(one).count, 1);
  PeerLoad alone = kDsv3;
  alone.ranks = 1;
  EXPECT_EQ(turns_of(alone).count, 1);
}

}  // namespace

}  // namespace guild::test
