// Token rounding: the counts that it asks for, and the lists that it leaves.
#include <algorithm>
#include <cmath>
#include <random>

#include "device_test.h"
#include "reference.h"
#include "shared/rounding.h"

namespace guild::test {

namespace {

constexpr Rounding kRoundings[] = {Rounding::nearest, Rounding::up, Rounding::down,
                                   Rounding::stochastic, Rounding::balanced};

TEST(Rounding, CountsAreWholeTiles) {
  for (Rounding rounding : kRoundings) {
    for (int64_t tile : {1, 2, 7, 128}) {
      int64_t before = 0, after = 0;
      for (int64_t e = 0; e < 300; ++e) {
        int64_t const count = e * 37 % 301;
        int64_t const rounded = rounded_count(rounding, tile, count, before, 9, e);
        EXPECT_EQ(rounded % tile, 0);
        EXPECT_LT(std::abs(rounded - count), tile);
        if (count % tile == 0) {
          EXPECT_EQ(rounded, count);
        }
        before += count, after += rounded;
        if (rounding == Rounding::balanced) {
          EXPECT_LE(2 * std::abs(after - before), tile);
        }
      }
    }
  }
}

// The n-th number of the generator SplitMix64 (Steele, Lea, Flood, 2014), as published.
uint64_t splitmix64(uint64_t seed, int64_t n) {
  uint64_t z = 0;
  for (int64_t i = 0; i <= n; ++i) {
    z = (seed += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z = z ^ (z >> 31);
  }
  return z;
}

// Each expert's rounded count, by the definition of Rounding.
std::vector<int64_t> counts_wanted(Rounding rounding, int64_t tile,
                                   std::vector<int64_t> const& counts, uint64_t seed) {
  auto const nearest = [&](int64_t count) {  // halves go up
    return int64_t(std::floor(double(count) / double(tile) + 0.5)) * tile;
  };
  std::vector<int64_t> wanted;
  int64_t sum = 0;
  for (int64_t count : counts) {
    int64_t down = 0;
    while (down + tile <= count) down += tile;
    int64_t const up = down == count ? count : down + tile, before = sum;
    sum += count;
    bool const draw = double(splitmix64(seed, int64_t(wanted.size())) >> 32) * double(tile) <
                      double(count - down) * 0x1p32;
    wanted.push_back(rounding == Rounding::up         ? up
                     : rounding == Rounding::down     ? down
                     : rounding == Rounding::nearest  ? nearest(count)
                     : rounding == Rounding::balanced ? nearest(sum) - nearest(before)
                                                      : (draw ? up : down));
  }
  return wanted;
}

TEST(Rounding, CountsByHand) {
  std::vector<int64_t> const counts = {0, 3, 4, 5, 8, 13, 2, 2};  // sums 0 3 7 12 20 33 35 37
  using Counts = std::vector<int64_t>;
  EXPECT_EQ(counts_wanted(Rounding::nearest, 8, counts, 0), (Counts{0, 0, 8, 8, 8, 16, 0, 0}));
  EXPECT_EQ(counts_wanted(Rounding::up, 8, counts, 0), (Counts{0, 8, 8, 8, 8, 16, 8, 8}));
  EXPECT_EQ(counts_wanted(Rounding::down, 8, counts, 0), (Counts{0, 0, 0, 0, 8, 8, 0, 0}));
  EXPECT_EQ(counts_wanted(Rounding::balanced, 8, counts, 0), (Counts{0, 0, 8, 8, 8, 8, 0, 8}));
  EXPECT_EQ(splitmix64(0, 0), 0xe220a8397b1dcdaf);  // its first numbers from the seed 0
  EXPECT_EQ(splitmix64(0, 1), 0x6e789e6aa1b965f4);
}

TEST(Rounding, CountsAreThoseOfTheirDefinition) {
  std::mt19937 random(2);
  for (Rounding rounding : kRoundings) {
    for (int64_t tile : {1, 2, 7, 12, 128}) {
      std::vector<int64_t> counts;
      for (int e = 0; e < 300; ++e) counts.push_back(random() % (3 * tile + 1));
      auto const wanted = counts_wanted(rounding, tile, counts, 42);
      int64_t before = 0;
      for (int e = 0; e < 300; before += counts[e++]) {
        ASSERT_EQ(rounded_count(rounding, tile, counts[e], before, 42, e), wanted[e])
            << int(rounding) << " tile " << tile << " expert " << e << " count " << counts[e];
      }
    }
  }
}

TEST(Rounding, StochasticGoesUpAsOftenAsTheRest) {
  int ups = 0;
  for (int64_t e = 0; e < 100000; ++e) {
    ups += rounded_count(Rounding::stochastic, 128, 256 + 32, 0, 77, e) == 384;
  }
  EXPECT_NEAR(ups, 25000, 600);
}

class RoundingTest : public DeviceTest {
 protected:
  struct Lists {
    std::vector<int32_t> token_offsets, ids;
    std::vector<double> scores;
  };

  Lists round(Matrix const& logits, std::vector<int32_t> const& ids, int64_t top_k,
              Router const& router, Rounding rounding, int64_t tile) {
    int64_t const tokens = logits.rows, experts = logits.cols;
    int64_t const slots = rounded_slots(tokens, experts, top_k, rounding, tile);
    Tensor given(device(), DType::float32, tokens, experts, experts + 3);
    given.set(logits.values);
    Indices<int32_t> const chosen(device(), ids);
    Indices<int64_t> const seed(device(), std::vector<int64_t>{42});
    Indices<int32_t> token_offsets(device(), tokens + 1), list_ids(device(), slots);
    Tensor scores(device(), DType::float32, slots, 1), slopes(device(), DType::float32, slots, 1);
    Bytes workspace(device(), rounding_workspace_bytes(tokens, experts));
    bool const sloped = has_slopes(router);
    device().run(TokenRounding{
        tokens, experts, top_k, DType::float32, router, rounding, tile, given.view(), chosen.data(),
        rounding == Rounding::stochastic ? seed.data() : nullptr, token_offsets.data(),
        list_ids.data(), scores.data(), sloped ? slopes.data() : nullptr, workspace.data()});
    EXPECT_TRUE(token_offsets.canaries_alive() && list_ids.canaries_alive() &&
                workspace.canaries_alive());
    scores.expect_untouched_from(slots, "scores");
    slopes.expect_untouched_from(sloped ? slots : 0, "slopes");
    return {token_offsets.get(), list_ids.get(), scores.get()};
  }

  void expect_best_kept(int64_t tokens, int64_t experts, int64_t tile, double step);

  std::mt19937_64 random_{7};
};

// Two different choices a token; every seventh is padding.
std::vector<int32_t> two_choices(int64_t tokens, int64_t experts, std::mt19937_64& random) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t) {
    auto const first = int32_t(random() % experts);
    bool const real = t % 7 != 3;
    ids.push_back(real ? first : -1);
    ids.push_back(real ? int32_t((first + 1) % experts) : -1);
  }
  return ids;
}

// Expects every rounding to keep the best of random choices; logits are multiples of `step`.
void RoundingTest::expect_best_kept(int64_t tokens, int64_t experts, int64_t tile, double step) {
  Matrix logits(tokens, experts);
  std::normal_distribution<double> normal(0, 2);
  for (double& v : logits.values) v = float(std::round(normal(random_) / step) * step);
  auto const ids = two_choices(tokens, experts, random_);
  Router const router{.score = Score::sigmoid,
                      .renormalize = false,
                      .scale = 2};  // ranked by the logits themselves
  for (Rounding rounding : kRoundings) {
    Lists const lists = round(logits, ids, 2, router, rounding, tile);
    std::vector<uint8_t> member(tokens * experts);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int32_t s = lists.token_offsets[t]; s < lists.token_offsets[t + 1]; ++s) {
        member[t * experts + lists.ids[s]] = 1;
        double const p = 1 / (1 + std::exp(-logits(t, lists.ids[s])));
        EXPECT_NEAR(lists.scores[s], 2 * p, 1e-6);
        EXPECT_TRUE(s == lists.token_offsets[t] || lists.ids[s - 1] < lists.ids[s]);
      }
    }
    std::vector<int64_t> counts(experts);
    for (int32_t id : ids) {
      if (id >= 0) ++counts[id];
    }
    auto const wanted = counts_wanted(rounding, tile, counts, 42);
    for (int32_t e = 0; e < experts; ++e) {
      std::vector<std::pair<double, int64_t>> order;  // choices first, then by falling logit
      for (int64_t t = 0; t < tokens; ++t) {
        bool const chosen = ids[2 * t] == e || ids[2 * t + 1] == e;
        if (ids[2 * t] >= 0) order.push_back({-logits(t, e) - (chosen ? 1e6 : 0), t});
      }
      std::sort(order.begin(), order.end());
      for (int64_t i = 0; i < int64_t(order.size()); ++i) {
        ASSERT_EQ(member[order[i].second * experts + e], i < wanted[e]) << "expert " << e;
      }
    }
    for (size_t s = lists.token_offsets[tokens]; s < lists.ids.size(); ++s) {
      EXPECT_TRUE(lists.ids[s] == -1 && lists.scores[s] == 0);
    }
  }
}

TEST_P(RoundingTest, TheBestAreKept) { expect_best_kept(1500, 37, 32, 0x1p-20); }

// More candidates, and more of them wanted, than a block holds, and many equal ones.
TEST_P(RoundingTest, TheBestOfManyAreKept) {
  expect_best_kept(20011, 3, 4000, 0x1p-20);
  expect_best_kept(20011, 3, 4000, 0.5);
  expect_best_kept(9000, 12, 100, 0x1p-20);
}

// More tokens than the blocks that measure them take at once: 64 each with 3 experts.
TEST_P(RoundingTest, TheBestOfVeryManyAreKept) { expect_best_kept(70001, 3, 20000, 0x1p-20); }

// The same with a softmax, whose parts are measured for each token: p of the kept, and none of the
// dropped is greater.
TEST_P(RoundingTest, SoftmaxOfVeryManyTokens) {
  constexpr int64_t kTokens = 70001, kExperts = 3, kTile = 7000;
  Matrix logits(kTokens, kExperts);
  std::normal_distribution<double> normal(0, 2);
  for (double& v : logits.values) v = float(normal(random_));
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kTokens; ++t) ids.push_back(int32_t(t % kExperts));
  Router const router{.renormalize = false};
  Lists const lists = round(logits, ids, 1, router, Rounding::down, kTile);
  std::vector<double> least(kExperts, 1), greatest_dropped(kExperts);
  std::vector<int64_t> kept(kExperts);
  for (int64_t t = 0; t < kTokens; ++t) {
    int32_t const e = ids[t], begin = lists.token_offsets[t];
    double sum = 0;
    for (int64_t i = 0; i < kExperts; ++i) sum += std::exp(logits(t, i));
    double const p = std::exp(logits(t, e)) / sum;
    if (lists.token_offsets[t + 1] == begin) {
      greatest_dropped[e] = std::max(greatest_dropped[e], p);
      continue;
    }
    ASSERT_EQ(lists.token_offsets[t + 1], begin + 1);
    ASSERT_EQ(lists.ids[begin], e);
    ASSERT_NEAR(lists.scores[begin], p, 1e-6) << "token " << t;
    least[e] = std::min(least[e], p);
    ++kept[e];
  }
  for (int64_t e = 0; e < kExperts; ++e) {
    EXPECT_EQ(kept[e], 3 * kTile) << "expert " << e;  // of 23,333 or 23,334
    EXPECT_LE(greatest_dropped[e], least[e] + 1e-6) << "expert " << e;
  }
}

TEST_P(RoundingTest, TiesGoToTheSmallerToken) {
  Matrix const logits(5000, 3);
  std::vector<int32_t> ids;
  for (int t = 0; t < 5000; ++t) ids.push_back(t % 2);
  Lists const lists = round(logits, ids, 1, {}, Rounding::down, 1024);
  for (int t = 0; t < 5000; ++t) {
    EXPECT_EQ(lists.token_offsets[t + 1] - lists.token_offsets[t], t < 4096) << t;
  }
}

TEST_P(RoundingTest, NoTokens) {
  EXPECT_EQ(round(Matrix(0, 4), {}, 2, {}, Rounding::up, 8).token_offsets, std::vector<int32_t>{0});
}

GUILD_DEVICE_TESTS(RoundingTest);

}  // namespace

}  // namespace guild::test
