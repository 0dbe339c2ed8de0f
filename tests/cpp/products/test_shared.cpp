// Host tests of the arithmetic in src/shared: activations, tile walks, the vectorised exponential.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "cases.h"
#include "reference.h"
#include "shared/activation.h"
#include "shared/bias_sums.h"
#include "shared/exponential.h"
#include "shared/routing.h"
#include "shared/sorting.h"
#include "shared/tiles.h"

namespace guild::test {

namespace {

constexpr float kNanF = std::numeric_limits<float>::quiet_NaN();

TEST(Activation, GradientIsTheDerivative) {
  double const step = 1e-6;
  for (NamedActivation const& named : activations()) {
    SCOPED_TRACE(named.name);
    Activation const& act = named.activation;
    for (double gate = -5.03; gate < 8.5; gate += 0.251) {
      for (double up : {-8.1, -0.6, -0.2, 0.3, 0.71, 7.5}) {
        auto const slope = [&](double dgate, double dup) {
          return (activate(act, gate + dgate, up + dup) - activate(act, gate - dgate, up - dup)) /
                 (2 * step);
        };
        auto const d = activate_gradient(act, gate, up, 1.5);
        EXPECT_NEAR(d.a, activate(act, gate, up), 1e-12);
        EXPECT_NEAR(d.dgate, 1.5 * slope(step, 0), 1e-6) << "gate " << gate << " up " << up;
        if (act.gated) {
          EXPECT_NEAR(d.dup, 1.5 * slope(0, step), 1e-6) << "gate " << gate;
        }
      }
    }
  }
}

TEST(Activation, AgreesWithItsDefinition) {
  for (NamedActivation const& named : activations()) {
    SCOPED_TRACE(named.name);
    for (double gate = -9; gate < 9; gate += 0.37) {
      for (double up : {-7.5, 0.25, 3.0}) {
        auto const expected = activated(named.activation, gate, up);
        auto const d = activate_gradient(named.activation, gate, up, 1.0);
        EXPECT_NEAR(d.a, expected.a, 1e-12);
        EXPECT_NEAR(d.dgate, expected.da_dgate, 1e-12);
        if (named.activation.gated) {
          EXPECT_NEAR(d.dup, expected.da_dup, 1e-12);
        }
      }
    }
  }
}

TEST(Activation, NanPassesThroughClamps) {
  for (NamedActivation const& named : activations()) {
    SCOPED_TRACE(named.name);
    Activation const& act = named.activation;
    EXPECT_TRUE(std::isnan(activate(act, kNanF, 1.f)));
    auto const d = activate_gradient(act, kNanF, 1.f, 1.f);
    EXPECT_TRUE(std::isnan(d.a));
    EXPECT_TRUE(std::isnan(d.dgate));
    if (!act.gated) continue;
    EXPECT_TRUE(std::isnan(activate(act, 1.f, kNanF)));
    EXPECT_TRUE(std::isnan(activate_gradient(act, 1.f, kNanF, 1.f).dgate));
  }
}

TEST(Activation, GptOssByHand) {
  Activation act;
  act.alpha = 1.702, act.limit = 7, act.up_offset = 1;
  double const s = 1 / (1 + std::exp(-1.702 * 7));
  EXPECT_NEAR(activate(act, 9.0, -20.0), 7 * s * (-7 + 1), 1e-4);
  EXPECT_EQ(activate_gradient(act, 9.0, 1.0, 1.0).dgate, 0);
  EXPECT_EQ(activate_gradient(act, 1.0, -20.0, 1.0).dup, 0);
}

TEST(Exponential, IsWithinTwoUnits) {
  for (float x = -103.f; x < 88.72f; x += 1.7e-3f) {
    double const truth = std::exp(double(x));
    double const unit = std::ldexp(1.0, std::max(std::ilogb(truth) - 23, -149));
    ASSERT_LE(std::abs(vector_exp(x) - truth), 2 * unit) << "x = " << x;
  }
  EXPECT_EQ(vector_exp(0), 1);
  EXPECT_EQ(vector_exp(-INFINITY), 0);
  EXPECT_EQ(vector_exp(-104), 0);
  EXPECT_EQ(vector_exp(-103), std::ldexp(1.f, -149));
  EXPECT_TRUE(std::isinf(vector_exp(INFINITY)));
  EXPECT_TRUE(std::isinf(vector_exp(89)));
  EXPECT_TRUE(std::isnan(vector_exp(kNanF)));
}

struct TileSize {
  int m, n;
};
constexpr TileSize kTileSizes[] = {{128, 256}, {128, 128}, {64, 48}, {256, 192}};

// Ends of random groups, some of them empty, some values out of range.
std::vector<int32_t> random_ends(std::mt19937& random, int groups, int& total) {
  std::vector<int32_t> ends;
  int end = 0;
  for (int g = 0; g < groups; ++g) ends.push_back(end += random() % 3 ? random() % 300 : 0);
  total = end + int(random() % 40);
  return ends;
}

// The rectangle of elements that a tile covers, each counted in `hits`.
void count_hits(Tile const& t, TileSize c, int columns, std::vector<int>& hits, int64_t first) {
  for (int row = t.row; row < t.row + t.rows; ++row) {
    for (int col = t.col; col < std::min(t.col + c.n, columns); ++col) {
      ++hits[(first + row) * columns + col];
    }
  }
}

// Calls f with every share of every tile, of as many blocks, in clusters of one or two.
template <class Work, class F>
void for_each_share(Work const& whole, int blocks, int cluster, TileSize c, F&& f) {
  for (int block = 0; block < blocks; ++block) {
    Work work = whole;
    work.tile_m = c.m * cluster;
    work.tail_m = cluster == 2 ? c.m : 0;
    TileWalk<Work> walk{work, block, blocks};
    for (Tile t; walk.next(t);) {
      for (int rank = 0; rank < cluster; ++rank) {
        f(share_of(t, rank, c.m, c.n, work.across * c.n));
      }
    }
  }
}

TEST(RowTiles, CoverEveryElementOnce) {
  std::mt19937 random(0);
  for (int trial = 0; trial < 300; ++trial) {
    int const groups = 1 + random() % 9, columns = 1 + random() % 900;
    int const blocks = 1 + random() % 13, cluster = 1 + trial % 2;
    int total = 0;
    auto const ends = random_ends(random, groups, total);
    for (TileSize const c : kTileSizes) {
      std::vector<int> hits(size_t(total) * columns);
      RowTiles const work{.groups = {ends.data(), groups, total},
                          .tile_n = c.n,
                          .across = int(ceil_div(columns, c.n)),
                          .inner = 64,
                          .band = int(1 + random() % 5) * cluster};
      for_each_share(work, blocks, cluster, c, [&](Tile const& t) {
        ASSERT_LE(t.row + t.rows, ends[t.expert]) << "a tile leaks out of its expert";
        ASSERT_LE(t.rows, c.m);
        count_hits(t, c, columns, hits, 0);
      });
      for (size_t i = 0; i < hits.size(); ++i) {
        ASSERT_EQ(hits[i], int64_t(i) < int64_t(ends.back()) * columns) << "element " << i;
      }
    }
  }
}

TEST(InnerTiles, GiveEveryGroupItsWholeOutputAndItsRows) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    int const groups = 1 + random() % 9, rows = 1 + random() % 400, columns = 1 + random() % 700;
    int const cluster = 1 + trial % 2;
    TileSize const c = kTileSizes[random() % 4];
    int total = 0;
    auto const ends = random_ends(random, groups, total);
    std::vector<int> hits(size_t(groups) * rows * columns);
    InnerTiles const work{.groups = {ends.data(), groups, total},
                          .tile_n = c.n,
                          .rows = rows,
                          .across = int(ceil_div(columns, c.n)),
                          .band = int(1 + random() % 5) * cluster};
    for_each_share(work, 1 + random() % 13, cluster, c, [&](Tile const& t) {
      int const begin = t.expert == 0 ? 0 : ends[t.expert - 1];
      ASSERT_EQ(t.inner_row, begin);
      ASSERT_EQ(t.inner, ends[t.expert] - begin);
      count_hits(t, c, columns, hits, int64_t(t.expert) * rows);
    });
    for (int h : hits) ASSERT_EQ(h, 1);
  }
}

// A pair of blocks with one row tile left takes two of its column tiles at a time.
TEST(RowTiles, TakeALastRowOfTilesApart) {
  int32_t const ends[] = {300};
  RowTiles const work{.groups = {ends, 1, 300}, .tile_n = 256, .across = 3, .inner = 64, .band = 8};
  int shares = 0, idle = 0;
  for_each_share(work, 1, 2, {128, 256}, [&](Tile const& t) {
    ++shares;
    idle += t.rows == 0;
    EXPECT_EQ(t.apart, t.row == 256);
  });
  EXPECT_EQ(shares, 2 * (3 + 2));
  EXPECT_EQ(idle, 1);
}

// Few rows are walked in bands of two columns of tiles, last tiles inside; more in wide ones.
TEST(RowTiles, BandsOfFewRowsAreNarrow) {
  auto const columns_of = [](int rows) {
    std::vector<int> columns;
    int32_t const ends[] = {rows};
    RowTiles const work{
        .groups = {ends, 1, rows}, .tile_n = 256, .across = 6, .inner = 64, .band = 4};
    for_each_share(work, 1, 2, {128, 256}, [&](Tile const& t) { columns.push_back(t.col / 256); });
    return columns;
  };
  EXPECT_EQ(columns_of(300),
            (std::vector<int>{0, 0, 1, 1, 0, 1, 2, 2, 3, 3, 2, 3, 4, 4, 5, 5, 4, 5}));
  auto const many = columns_of(RowTiles::kFewRows + 1);
  EXPECT_EQ(std::vector<int>(many.begin(), many.begin() + 8),
            (std::vector<int>{0, 0, 1, 1, 2, 2, 3, 3}));
}

// 129 to 192 rows as well, if no block idles: 128 of them and at most 64, which cost half a tile.
TEST(RowTiles, TakeTwoLastRowsOfTilesApart) {
  for (int const rows : {384, 385, 448, 449}) {
    for (int const across : {3, 4}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << across << " tiles across");
      int32_t const ends[] = {rows};
      RowTiles const work{
          .groups = {ends, 1, rows}, .tile_n = 256, .across = across, .inner = 64, .band = 8};
      int apart = 0, small = 0;
      for_each_share(work, 1, 2, {128, 256}, [&](Tile const& t) {
        apart += t.apart && t.rows > 0;
        small += t.apart && t.rows > 0 && t.rows <= 64;
      });
      bool const split = rows > 384 && rows <= 448 && across == 4;
      EXPECT_EQ(apart, rows == 384 ? across : split ? 2 * across : 0);
      EXPECT_EQ(small, split ? across : 0);
    }
  }
}

TEST(Groups, KeepAnyEndsInsideTheBuffer) {
  int32_t const ends[] = {-5, 900, 3, 0x7fffffff, 50};
  Groups const groups{ends, 5, 100};
  int begin = 0;
  for (int g = 0; g < 5; ++g) {
    int const end = groups.end(g, begin);
    EXPECT_GE(end, begin);
    EXPECT_LE(end, 100);
    begin = end;
  }
}

TEST(BiasSums, NoTwoChunksMeet) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    int const experts = 1 + int(random() % 20), most = round % 2 == 0 ? 3 : 200;
    std::vector<int> seen;
    int begin = 0;
    for (int e = 0; e < experts; ++e) {
      int const end = begin + int(random() % most);
      for (int row = begin; row < end; row += kBiasChunkRows) seen.push_back(bias_chunk_of(row, e));
      begin = end;
    }
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end(), std::less_equal<>())) << "round " << round;
    if (seen.empty()) continue;
    EXPECT_LT(seen.back(), most_bias_chunks(begin, experts)) << "round " << round;
  }
  EXPECT_EQ(most_bias_chunks(0, 5), 0);
  EXPECT_EQ(most_bias_chunks(int64_t(1) << 40, 3), (int64_t(1) << 34) + 3);
}

TEST(Routing, OrderOfNumbers) {
  float const inf = std::numeric_limits<float>::infinity();
  float const rising[] = {kNanF, -inf, -3.4e38f, -1.f, -1e-45f, 0.f, 1e-45f, 0.5f, 1e30f, inf};
  for (size_t i = 1; i < std::size(rising); ++i) {
    EXPECT_LT(order_of(rising[i - 1]), order_of(rising[i])) << rising[i];
  }
  EXPECT_EQ(order_of(-0.f), order_of(0.f));
  EXPECT_EQ(order_of(-kNanF), order_of(kNanF));
  EXPECT_GT(order_of(kNanF), 0u);
  for (float x : rising) {
    if (x == x) {
      EXPECT_EQ(value_of(order_of(x)), x);
    }
  }
  EXPECT_TRUE(std::isnan(value_of(order_of(kNanF))));
}

TEST(Routing, ChunksCoverAllSlots) {
  for (int64_t slots : {int64_t(1), int64_t(511), int64_t(512), int64_t(513), int64_t(196608),
                        int64_t(65537), (int64_t(1) << 31) - 1}) {
    int64_t const chunk = sort_chunk_slots(slots), chunks = sort_chunks(slots);
    EXPECT_EQ(chunk % kSortThreads, 0);
    EXPECT_TRUE(chunks >= 1 && chunks <= kMostSortChunks) << slots;
    EXPECT_TRUE(chunks * chunk >= slots && (chunks - 1) * chunk < slots) << slots;
    int64_t const clusters = sort_clusters(slots);
    EXPECT_TRUE(clusters * kSortCluster >= chunks && (clusters - 1) * kSortCluster < chunks);
  }
}

}  // namespace

}  // namespace guild::test
