// How a layer over ranks divides its products: src/shared/peer_overlap.h.
#include <gtest/gtest.h>

#include <cmath>

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
  EXPECT_EQ(alone.travel(), 0);
}

TEST(PeerOverlap, LargeProductsHideMostOfTheWay) {
  for (PeerLoad const& load : {kDsv3, kGptoss, kQwen}) {
    int64_t const first = first_experts(load);
    EXPECT_GT(first, 0);
    EXPECT_LT(first, load.experts / 4);
    EXPECT_LT(load.exposed(first), load.travel() / 2);
    for (int64_t other = 1; other < load.experts; ++other) {
      EXPECT_LE(load.exposed(first), load.exposed(other)) << other;
    }
  }
}

// The same with four ranks, each of which has half as many experts.
EarlySums over_four(PeerLoad load, int64_t intermediate) {
  load.ranks = 4, load.experts /= 2;
  return {load, intermediate};
}

TEST(PeerOverlap, SharesOfSums) {
  EarlySums const sums = over_four(kQwen, 768);
  EXPECT_EQ(sums.early(32), 0);
  EXPECT_EQ(sums.early(0), 1);
  // Of the tokens with one of a quarter of the experts, those with none of the last sixteenth.
  EXPECT_NEAR(sums.early(8), (std::pow(15. / 16, 8) - std::pow(.75, 8)) / (1 - std::pow(.75, 8)),
              1e-12);
  EXPECT_EQ(EarlySums({.ranks = 2, .experts = 8, .top_k = 1}).early(2), .75);
}

TEST(PeerOverlap, ManyRanksSendSumsEarly) {
  for (EarlySums const& sums :
       {over_four(kDsv3, 2048), over_four(kGptoss, 2880), over_four(kQwen, 768)}) {
    int64_t const last = last_experts(sums);
    EXPECT_GT(last, 0);
    EXPECT_LT(last, sums.load.experts / 4);
    EXPECT_LT(sums.exposed(last), .7 * sums.load.travel());
  }
  for (EarlySums const& sums : {EarlySums{kDsv3, 2048}, {kGptoss, 2880}, {kQwen, 768}}) {
    EXPECT_EQ(last_experts(sums), 0);  // two ranks
  }
}

// Those of tests/python/distributed: on one GPU, and on two and four.
TEST(PeerOverlap, LayersOfTestsSendSumsEarly) {
  for (int64_t const ranks : {2, 4}) {
    PeerLoad const load{.ranks = ranks,
                        .tokens = 8192,
                        .experts = 16 / ranks,
                        .top_k = 1,
                        .row_bytes = 14336,
                        .inner = 7168,
                        .columns = 2048};
    int64_t const last = last_experts({load, 1024});
    EXPECT_GT(last, 0) << ranks;
    EXPECT_LT(first_experts(load), load.experts - last) << ranks;
  }
}

TEST(PeerOverlap, FewSumsWait) {
  EarlySums sums = over_four(kQwen, 768);
  sums.load.tokens = 64;
  EXPECT_EQ(last_experts(sums), 0);
  sums = over_four(kDsv3, 2048), sums.load.experts = 1;
  EXPECT_EQ(last_experts(sums), 0);
  sums.load.ranks = 1, sums.load.experts = 64;
  EXPECT_EQ(last_experts(sums), 0);
}

TEST(PeerOverlap, SmallProductsStayWhole) {
  PeerLoad few = kQwen;
  few.tokens = 64;
  EXPECT_EQ(first_experts(few), few.experts);
  PeerLoad one = kDsv3;
  one.experts = 1;
  EXPECT_EQ(first_experts(one), 1);
  PeerLoad alone = kDsv3;
  alone.ranks = 1;
  EXPECT_EQ(first_experts(alone), alone.experts);
}

}  // namespace

}  // namespace guild::test
