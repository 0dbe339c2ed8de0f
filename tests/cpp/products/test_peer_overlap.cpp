// How a layer over ranks divides its products, and how warps share its tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "shared/peer_overlap.h"
#include "shared/token_shares.h"

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

// How often the warps of all blocks take each piece of each token.
std::vector<int> times_taken(TokenShares const& shares, int tokens) {
  std::vector<int> taken(size_t(tokens * shares.pieces));
  for (int block = 0; block < shares.blocks; ++block) {
    for (int warp = 0; warp < shares.warps; ++warp) {
      int const step = shares.blocks * shares.warps;
      for (int i = shares.first(block, warp); i < tokens * shares.parts; i += step) {
        int const begin = i % shares.parts * shares.per;
        int const end = std::min(begin + shares.per, shares.pieces);
        EXPECT_LT(begin, end);
        for (int piece = begin; piece < end; ++piece) {
          ++taken[size_t(i / shares.parts * shares.pieces + piece)];
        }
      }
    }
  }
  return taken;
}

TEST(TokenShares, EveryPieceOnce) {
  for (int const warps : {1, 16, 32}) {
    for (int const blocks : {1, 8, 66, 132}) {
      for (int const pieces : {1, 2, 7, 14, 33}) {
        for (int const tokens : {1, 2, 3, 65, 132, 1055, 1056, 1057, 2113, 9000}) {
          TokenShares const shares = TokenShares::of(tokens, pieces, warps, blocks);
          SCOPED_TRACE(testing::Message() << tokens << " tokens, " << pieces << " pieces, "
                                          << blocks << " blocks of " << warps);
          EXPECT_LE(shares.warps, warps);
          EXPECT_LE(shares.blocks, blocks);
          for (int const times : times_taken(shares, tokens)) ASSERT_EQ(times, 1);
        }
      }
    }
  }
}

// With few tokens as many warps as possible have something to do, on all multiprocessors.
TEST(TokenShares, FewTokensAreDivided) {
  TokenShares const one = TokenShares::of(1, 7, 16, 132);
  EXPECT_TRUE(one.parts == 7 && one.per == 1 && one.blocks == 7 && one.warps == 1);
  TokenShares const some = TokenShares::of(256, 14, 16, 132);
  EXPECT_TRUE(some.parts == 7 && some.blocks == 132 && some.warps == 14);
  TokenShares const many = TokenShares::of(16384, 4, 16, 132);
  EXPECT_TRUE(many.parts == 1 && !many.spread && many.blocks == 132 && many.warps == 16);
}

}  // namespace

}  // namespace guild::test
