// Host tests of the cost model that chooses a config for each product.
#include <gtest/gtest.h>

#include <random>

#include "shared/gemm_config.h"

namespace guild::test {

namespace {

GemmConfig chosen(Product product, TileCount const& count) {
  return kConfigs[choose_config(product, count)].config;
}

// Blocks go in pairs unless a group's last row tile would often leave one of a pair without work.
TEST(ChooseConfig, WeighsIdleBlocksAgainstSharedLoads) {
  auto const cluster = [](Product product, int64_t rows, int64_t groups, int64_t columns) {
    bool const ragged = product != Product::experts;
    return chosen(product, {rows, groups, columns, /*inner=*/4096, ragged}).cluster;
  };
  EXPECT_EQ(cluster(Product::rows, 32768 * 8, 128, 1024), 2);
  EXPECT_EQ(cluster(Product::rows, 64 * 128, 128, 256), 1);
  EXPECT_EQ(cluster(Product::rows, 64 * 128, 128, 768), 1);
  EXPECT_EQ(cluster(Product::rows, 0, 1, 512), 1);
  EXPECT_EQ(cluster(Product::experts, 4096, 8, 256), 2);
  EXPECT_EQ(cluster(Product::experts, 128, 128, 512), 2);
  EXPECT_EQ(cluster(Product::experts, 128, 128, 256), 1);
}

// As measured on an H200: pairs, whose first tile comes later, lose where there are few tiles, and
// where an expert's 320 columns leave most of a second tile empty.
TEST(ChooseConfig, TakesPairsWhereThatIsFaster) {
  auto const cluster = [](Product product, TileCount const& count) {
    return chosen(product, count).cluster;
  };
  EXPECT_EQ(cluster(Product::rows, {2907, 9, 832, 1408}), 1);
  EXPECT_EQ(cluster(Product::rows, {147150, 225, 832, 2816}), 2);
  EXPECT_EQ(cluster(Product::up, {2705, 9, 1024, 1344}), 1);
  EXPECT_EQ(cluster(Product::up, {262144, 128, 1536, 2048}), 2);  // qwen30b
  EXPECT_EQ(cluster(Product::down_gradient, {285985, 358, 320, 5696}), 1);
  EXPECT_EQ(cluster(Product::down_gradient, {262144, 128, 768, 2048}), 2);
  EXPECT_EQ(cluster(Product::experts, {4672, 12, 320, 4506, false}), 1);
  EXPECT_EQ(cluster(Product::experts, {7168, 256, 2048, 512, false}), 2);  // dsv3
}

// As measured on an H200: tiles in turns where those of 256 columns leave many empty.
TEST(ChooseConfig, TakesTurnsWhereThatIsFaster) {
  struct Case {
    int64_t rows, groups, columns, inner;
    bool in_turns;
  };
  for (Case const& c : {Case{196608, 128, 1536, 2 * 256, false},  // up gradient of fine7b
                        Case{131390, 366, 2112, 960, true},       // down projections: 8.25 tiles,
                        Case{262144, 64, 2048, 1024, false},      // olmoe,
                        Case{262144, 128, 4096, 1024, false},     // sonic30b,
                        Case{98304, 128, 2880, 2880, true},       // gptoss: 11.25 tiles of 256,
                        Case{147150, 225, 832, 2816, false},      // 3.25 tiles, but 4.33 of 192
                        Case{32768, 8, 4096, 14336, false}}) {    // mixtral
    TileCount const count{c.rows, c.groups, c.columns, c.inner};
    EXPECT_EQ(chosen(Product::rows, count).in_turns, c.in_turns) << c.columns << " " << c.inner;
    EXPECT_FALSE(chosen(Product::up, count).in_turns);
  }
}

// Counted by hand. A last tile of at most 64 rows is half a tile. 600 columns are 3 tiles of 256,
// an odd number, of which a pair leaves one idle where a group's last row of tiles is split by
// columns.
TEST(ChooseConfig, TilesByHand) {
  BuiltConfig const alone{{128, 256, 4}, {}, 0, .75}, pair{{128, 256, 4, 2}, {}, 0, .875};
  auto const tiles = [](BuiltConfig const& c, int64_t rows, int64_t columns) {
    return tiles_of(c.config, rows, ceil_div(columns, c.config.tile_n), c.half);
  };
  EXPECT_DOUBLE_EQ(tiles(alone, 0, 600), 0);
  EXPECT_DOUBLE_EQ(tiles(alone, 65, 600), 3);
  EXPECT_DOUBLE_EQ(tiles(alone, 300, 600), 2.75 * 3);
  EXPECT_DOUBLE_EQ(tiles(pair, 300, 600), 2 * 3 + .875 * 4);
  EXPECT_DOUBLE_EQ(tiles(pair, 330, 600), 2 * 3 + 4);
  EXPECT_DOUBLE_EQ(tiles(pair, 420, 600), 4 * 3);  // the second of the pair has 36 rows of 128
  EXPECT_DOUBLE_EQ(tiles(pair, 420, 512), 2 * 2 + 1.875 * 2);  // split, as none idles
  EXPECT_DOUBLE_EQ(tiles(pair, 512, 600), 4 * 3);
  TileCount const whole{.rows = 300, .groups = 4, .columns = 600, .ragged = false};
  EXPECT_DOUBLE_EQ(expected_tiles(alone, whole), 4 * 3 * 3);  // weight gradients know no halves
  EXPECT_DOUBLE_EQ(expected_tiles(pair, whole), 4 * (2 * 3 + 4));
  // Ragged: 640 rows a group, give or take 25, are 5 tiles and, in half of the groups, half a tile
  // more. Two columns of tiles leave no block of a pair idle there.
  TileCount const ragged{.rows = 2560, .groups = 4, .columns = 512};
  EXPECT_DOUBLE_EQ(expected_tiles(pair, ragged), 4 * 2 * (5 + .875 / 2));
  EXPECT_DOUBLE_EQ(expected_tiles(alone, ragged), 4 * 2 * (5 + .75 / 2));
  BuiltConfig const turns{{128, 256, 4, 1, 2, true}, {}, 0, .5};
  EXPECT_DOUBLE_EQ(expected_tiles(turns, ragged), 4 * 2 * (5 + .5 / 2));
  // 96 rows a group, give or take 10, are a tile: few are as small as 64.
  TileCount const small{.rows = 384, .groups = 4, .columns = 256};
  EXPECT_DOUBLE_EQ(expected_tiles(alone, small), 4);
  EXPECT_DOUBLE_EQ(expected_tiles(alone, {.rows = 0, .groups = 4, .columns = 256}), 0);
}

// 132 blocks: whole waves up to the seventh, then half a wave more than the tiles fill.
TEST(ChooseConfig, WavesByHand) {
  EXPECT_EQ(waves(0, 1), 0);
  EXPECT_EQ(waves(1, 1), 1);
  EXPECT_EQ(waves(132, 1), 1);
  EXPECT_EQ(waves(133, 1), 2);
  EXPECT_EQ(waves(132 * 6 + 1, 1), 7);
  EXPECT_EQ(waves(132 * 7 + 33, 1), 7.75);
  EXPECT_EQ(waves(132 * 8, 1), 8.5);
  EXPECT_EQ(waves(66, 2), 0.5);  // two tiles at once: half of a wave
  EXPECT_EQ(waves(67, 2), 1);
  EXPECT_EQ(waves(132 * 8, 2), 8.25);
  // 251 to 277 tiles are two waves and, of the upper two fifths, three.
  EXPECT_DOUBLE_EQ(expected_waves(264, 1), 2.4);
}

// A step of 128 x 256 costs 1024 cycles, of 128 x 192 768; 130 terms of a sum are 3 steps of 64.
TEST(ChooseConfig, CostsByHand) {
  BuiltConfig const alone{{128, 256, 4}, {1.5, 1, 1.25, 1, 1}, 400};
  BuiltConfig const turns{{128, 192, 4, 1, 2, true}, {1}, 3500};
  TileCount const one_round{.rows = 1000, .groups = 4, .columns = 256, .inner = 130};
  EXPECT_DOUBLE_EQ(expected_cost(alone, Product::rows, one_round), 1.5 * 3 * 1024 + 400);
  EXPECT_DOUBLE_EQ(expected_cost(alone, Product::up, one_round), 1.25 * 3 * 1024 + 400);
  // 60 tiles of rows, the last in part, times 4 of 256 columns: 240 tiles, two rounds.
  TileCount const two_rounds{.rows = 7600, .groups = 1, .columns = 1024, .inner = 130};
  EXPECT_DOUBLE_EQ(expected_cost(alone, Product::rows, two_rounds), 2 * (1.5 * 3 * 1024 + 400));
  // In turns: 60 times 6 of 192 columns, 360 tiles in 6 halves of rounds. Consumers hide what is
  // outside of their sums, unless half of all that a tile takes is longer.
  EXPECT_DOUBLE_EQ(expected_cost(turns, Product::rows, two_rounds), 3 * (3 * 768 + 3500) / 2.0);
  // 19.6 tiles are one for some consumers, which is half a round.
  EXPECT_DOUBLE_EQ(expected_cost(turns, Product::rows, one_round), (3 * 768 + 3500) / 4.0);
  TileCount long_sums = two_rounds;
  long_sums.inner = 6400;
  EXPECT_DOUBLE_EQ(expected_cost(turns, Product::rows, long_sums), 3 * 100 * 768);
  // 128 columns in a tile of 256: as many again as there are.
  BuiltConfig const narrow{{128, 256, 4}, {1.5}, 400, 1, {-.25}};
  TileCount const half_tiles{.rows = 1000, .groups = 4, .columns = 128, .inner = 130};
  EXPECT_DOUBLE_EQ(expected_cost(narrow, Product::rows, half_tiles), .75 * 1.5 * 3 * 1024 + 400);
  // The launch of pairs takes longer, whatever follows it.
  BuiltConfig const pair{{128, 256, 4, 2}, {1}, 400, 1, {}, 5000};
  EXPECT_DOUBLE_EQ(expected_cost(pair, Product::rows, one_round), 5000 + 3 * 1024 + 400);
  EXPECT_DOUBLE_EQ(expected_cost(pair, Product::rows, two_rounds), 5000 + 2 * (3 * 1024 + 400));
}

// No config that serves the product costs less, as the tests above count it.
TEST(ChooseConfig, TakesTheLeastCost) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 1000; ++trial) {
    TileCount const count{.rows = int64_t(random() % 100000),
                          .groups = int64_t(1 + random() % 384),
                          .columns = int64_t(8 + random() % 8000),
                          .inner = int64_t(random() % 8000),
                          .ragged = random() % 2 != 0};
    for (Product const product :
         {Product::rows, Product::direct, Product::up, Product::down_gradient, Product::experts}) {
      BuiltConfig const& choice = kConfigs[choose_config(product, count)];
      EXPECT_TRUE(choice.serves(product));
      for (BuiltConfig const& other : kConfigs) {
        if (!other.serves(product)) continue;
        EXPECT_LE(expected_cost(choice, product, count), expected_cost(other, product, count));
      }
    }
  }
}

}  // namespace

}  // namespace guild::test
