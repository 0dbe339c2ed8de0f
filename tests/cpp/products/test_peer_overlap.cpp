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
