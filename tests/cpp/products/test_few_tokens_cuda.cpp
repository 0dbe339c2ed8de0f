// Which kernels serve few tokens: the steps of a layer must agree, since what one step leaves to
// the products (a sort, shared experts) only kernels for few tokens do. Needs no GPU.
#include <gtest/gtest.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/decode/tall_tiles.h"
#include "cuda/sm90/products.h"

namespace guild::test {
namespace {

struct Choices {
  bool up, down, layer, sort;
};

Choices choices(Sizes const& s) {
  int32_t offsets[1];  // not read
  Groups const groups{offsets, int(s.experts), int(s.rows()), /*has_start=*/true};
  cuda::UpProduct up;
  up.rows = s.rows(), up.tokens = s.tokens, up.n = s.intermediate, up.k = s.hidden;
  up.groups = groups;
  cuda::RowProduct down;
  down.rows = s.rows(), down.tokens = s.tokens, down.n = s.hidden, down.k = s.intermediate;
  down.groups = groups;
  Sort const sort{.tokens = s.tokens, .experts = s.experts, .top_k = s.top_k};
  return {cuda::sm90::serves_few_tokens(up), cuda::sm90::serves_few_tokens(down),
          cuda::sm90::fuses_shared_experts(s), cuda::sm90::products_sort(sort)};
}

TEST(FewTokens, StepsAgree) {
  for (int64_t const experts : {1, 2, 8, 60, 512}) {
    for (int64_t const top_k : {1, 2, 10}) {
      if (top_k > experts) continue;
      for (auto const& [hidden, intermediate] : {std::pair{512, 64}, {4096, 14336}}) {
        for (int64_t tokens = 1; tokens < 4096; tokens += 1 + tokens / 16) {
          Sizes const sizes{.tokens = tokens,
                            .hidden = hidden,
                            .intermediate = intermediate,
                            .experts = experts,
                            .top_k = top_k};
          Choices const found = choices(sizes);
          auto const where = [&] {
            return testing::Message() << tokens << " tokens, " << top_k << " of " << experts
                                      << " experts, " << hidden << " x " << intermediate;
          };
          EXPECT_EQ(found.up, found.down) << where();
          EXPECT_EQ(found.up, found.layer) << where();
          EXPECT_TRUE(found.up || !found.sort) << where();
        }
      }
    }
  }
}

TEST(FewTokens, AreFewPerExpertAndMoreOfSmallOnes) {
  auto const few = [](int64_t tokens, int64_t intermediate) {
    return choices({.tokens = tokens,
                    .hidden = 4096,
                    .intermediate = intermediate,
                    .experts = 8,
                    .top_k = 2})
        .layer;
  };
  EXPECT_TRUE(few(112, 14336));  // 28 rows an expert
  EXPECT_FALSE(few(113, 14336));
  EXPECT_TRUE(few(160, 1024));  // 40
  EXPECT_FALSE(few(161, 1024));
}

// Gate and up beside each other in one matrix of each of 8 experts, 1,000 rows of 500 tokens.
cuda::UpProduct tall_product() {
  static int32_t const offsets[9] = {};
  static std::byte weights[32];
  cuda::UpProduct x;
  x.rows = 1000, x.tokens = 500, x.n = 64, x.k = 128;
  x.groups = {offsets + 1, 8, 1000, /*has_start=*/true};
  x.pairing = cuda::Pairing::halves;
  x.w[0] = {weights, 2 * 64 * 128, 128, 1};
  x.w[1] = {weights + 16, 2 * 64 * 128, 128, 1};
  return x;
}

TEST(TallTiles, ServeMoreThan64TokensOfUpTo160RowsAnExpert) {
  cuda::UpProduct x = tall_product();
  EXPECT_TRUE(cuda::sm90::serves_tall(x));
  x.tokens = 64;
  EXPECT_FALSE(cuda::sm90::serves_tall(x));
  x.tokens = 65, x.rows = 8 * 160;
  EXPECT_TRUE(cuda::sm90::serves_tall(x));
  x.rows = 8 * 160 + 1;
  EXPECT_FALSE(cuda::sm90::serves_tall(x));
}

TEST(TallTiles, LeaveOthersWhatTheyCannotServe) {
  auto const served_with = [](auto&& change) {
    cuda::UpProduct x = tall_product();
    change(x);
    return cuda::sm90::serves_tall(x);
  };
  using Up = cuda::UpProduct;
  int32_t places[8] = {};
  Sort const sort{};
  EXPECT_FALSE(served_with([](Up& x) { x.h.data = &x; })) << "H is wanted";
  EXPECT_FALSE(served_with([&](Up& x) { x.sort = &sort; })) << "the product sorts";
  EXPECT_FALSE(served_with([](Up& x) { x.shared.n = 64; })) << "shared experts";
  EXPECT_FALSE(served_with([](Up& x) { std::swap(x.w[0], x.w[1]); })) << "up before gate";
  EXPECT_FALSE(served_with([&](Up& x) { x.w[1].expert_at = places; })) << "up in any order";
  EXPECT_FALSE(served_with([](Up& x) { x.w[1].out_stride = 256; })) << "rows of up further apart";
  EXPECT_FALSE(served_with([](Up& x) {
    for (ConstWeight& w : x.w) w.out_stride = 1, w.in_stride = 64;
  })) << "transposed";
  EXPECT_TRUE(served_with([&](Up& x) {
    x.pairing = cuda::Pairing::alternate, x.w[0].expert_at = places;
  })) << "one matrix for each expert, wherever it lies";
}

TEST(TallTiles, ShareEvenlyAndCoverEveryRowOnce) {
  int const begin = 5, columns = 300, tile_n = 64, narrow = 40;
  for (int rows = 0; rows < 1100; rows += rows < 50 ? 1 : 7) {
    SCOPED_TRACE(testing::Message() << rows << " rows");
    int32_t const ends[] = {begin, begin + rows};
    cuda::sm90::TallTiles const work{{ends, 2, begin + rows}, tile_n, columns, narrow};
    int const wide = rows > narrow ? 2 * tile_n : tile_n, across = int(ceil_div(columns, wide));
    int const count = work.matrix(begin, begin + rows).count();
    EXPECT_EQ(count, across * ceil_div(rows, rows > 304 ? 128 : 152));
    std::vector<int> covered(size_t(across * rows));
    int least = rows, most = 0;
    for (int i = 0; i < count; ++i) {
      Tile const tile = work.at(i, 1, begin, begin + rows);
      EXPECT_EQ(tile.expert, 1);
      EXPECT_EQ(tile.apart, rows > narrow) << "whether it is broad";
      EXPECT_EQ(tile.col % wide, 0);
      least = std::min(least, tile.rows), most = std::max(most, tile.rows);
      for (int r = 0; r < tile.rows; ++r) {
        ++covered.at(size_t(tile.col / wide * rows + tile.row - begin + r));
      }
    }
    for (int const times : covered) EXPECT_EQ(times, 1);
    EXPECT_LE(most, rows > 304 ? 128 : 152);
    EXPECT_LE(most - least, 8 * count / across) << "the last tile lacks what others are rounded by";
  }
}

}  // namespace
}  // namespace guild::test
