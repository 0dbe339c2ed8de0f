// The router and its gradient.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "device_test.h"
#include "reference.h"

namespace guild::test {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Logits {
  int64_t tokens, experts, top_k;
  Router router;
  Matrix values;
  std::vector<double> bias;           // of the selection; empty: none
  std::vector<uint8_t> token_mask{};  // empty: none
};

// p of one logit, up to a factor that softmax gives all logits of a token.
double share_of(Score score, double logit, double top) {
  if (score == Score::softmax) return std::exp(logit - top);
  if (score == Score::sigmoid) return 1 / (1 + std::exp(-logit));
  return logit < -40 ? std::exp(logit / 2) : std::sqrt(std::log1p(std::exp(logit)));
}

// p of every expert of one token.
std::vector<double> probabilities(Logits const& l, int64_t token) {
  std::vector<double> p(l.experts);
  double sum = 0, top = -INFINITY;
  for (int64_t e = 0; e < l.experts; ++e) top = std::max(top, l.values(token, e));
  for (int64_t e = 0; e < l.experts; ++e) {
    p[e] = share_of(l.router.score, l.values(token, e), top);
    sum += p[e];
  }
  if (l.router.score == Score::softmax) {
    for (double& x : p) x /= sum;
  }
  return p;
}

// The scores of given ids: p, divided by their sum or its floor if asked for, times scale.
std::vector<double> scores_of(Logits const& l, int64_t token, std::vector<int32_t> const& ids) {
  auto const p = probabilities(l, token);
  std::vector<double> w;
  for (int32_t id : ids) w.push_back(id >= 0 && id < l.experts ? p[id] : 0);
  double const sum = std::max(std::accumulate(w.begin(), w.end(), 0.0), l.router.sum_floor);
  for (double& x : w) x *= l.router.scale / (l.router.renormalize && sum > 0 ? sum : 1);
  return w;
}

// d(log p) / dlogit where p depends on its own logit alone.
double slope_of(Score score, double logit) {
  double const sigmoid = 1 / (1 + std::exp(-logit)), p = share_of(score, logit, 0);
  return score == Score::sigmoid ? 1 - sigmoid : sigmoid / (2 * p * p);
}

// The scores of every token, and the slopes of its ids.
std::pair<std::vector<double>, std::vector<double>> scores_and_slopes(
    Logits const& l, std::vector<int32_t> const& ids) {
  std::vector<double> scores, slopes;
  for (int64_t t = 0; t < l.tokens; ++t) {
    std::vector<int32_t> const chosen(ids.begin() + t * l.top_k, ids.begin() + (t + 1) * l.top_k);
    auto const w = scores_of(l, t, chosen);
    scores.insert(scores.end(), w.begin(), w.end());
    for (int32_t id : chosen) {
      bool const real = id >= 0 && id < l.experts;
      slopes.push_back(real ? slope_of(l.router.score, l.values(t, id)) : 0);
    }
  }
  return {scores, slopes};
}

// The keys that experts are chosen by: p + bias, -infinity outside the best groups.
std::vector<double> keys_of(Logits const& l, int64_t token) {
  auto key = probabilities(l, token);
  for (size_t e = 0; e < l.bias.size(); ++e) key[e] += l.bias[e];
  int64_t const groups = l.router.groups, size = l.experts / groups;
  std::vector<std::pair<double, int64_t>> scored;  // by falling score, then by number
  for (int64_t g = 0; g < groups; ++g) {
    std::vector<double> part(key.begin() + g * size, key.begin() + (g + 1) * size);
    std::sort(part.rbegin(), part.rend());
    bool const two = size > 1 && l.router.group_score == GroupScore::top2_sum;
    scored.push_back({-(two ? part[0] + part[1] : part[0]), g});
  }
  std::sort(scored.begin(), scored.end());
  for (int64_t i = l.router.top_groups; i < groups; ++i) {
    std::fill_n(key.begin() + scored[i].second * size, size, -INFINITY);
  }
  return key;
}

class RouterTest : public DeviceTest {
 protected:
  std::vector<DType> score_dtypes() const {
    if (on_cuda()) return {DType::float32};
    return {DType::float32, DType::float64};
  }

  Logits random(int64_t tokens, int64_t experts, int64_t top_k, Router router, bool biased) {
    Logits l{tokens, experts, top_k, router, Matrix(tokens, experts), {}, {}};
    std::normal_distribution<double> normal(0, 2);
    for (double& v : l.values.values) v = float(normal(random_));
    for (int64_t e = 0; biased && e < experts; ++e) l.bias.push_back(float(normal(random_) / 10));
    return l;
  }

  struct Chosen {
    std::vector<int32_t> ids;
    std::vector<double> scores, slopes;
    std::vector<int32_t> ids_of(int64_t token, int64_t k) const {
      return {ids.begin() + token * k, ids.begin() + (token + 1) * k};
    }
  };

  Chosen route(Logits const& l, DType dtype) {
    Tensor logits(device(), dtype, l.tokens, l.experts, l.experts + 3);
    logits.set(l.values.values);
    Tensor bias(device(), dtype, 1, l.experts);
    if (!l.bias.empty()) bias.set(l.bias);
    Indices<int32_t> ids(device(), l.tokens * l.top_k);
    Tensor scores(device(), dtype, l.tokens, l.top_k);
    Indices<uint8_t> const mask(device(), l.token_mask);
    bool const sloped = has_slopes(l.router);
    Tensor slopes(device(), dtype, sloped ? l.tokens : 0, l.top_k);
    device().run(Route{l.tokens, l.experts, l.top_k, dtype, l.router, logits.view(),
                       l.bias.empty() ? nullptr : bias.data(), ids.data(), scores.data(),
                       l.token_mask.empty() ? nullptr : mask.data(),
                       sloped ? slopes.data() : nullptr});
    EXPECT_TRUE(ids.canaries_alive()) << "ids: written past their ends";
    scores.expect_untouched_from(l.tokens, "scores");
    slopes.expect_untouched_from(sloped ? l.tokens : 0, "slopes");
    return {ids.get(), scores.get(), slopes.get()};
  }

  std::mt19937_64 random_{3};
};

std::vector<Router> routers() {
  std::vector<Router> all;
  for (Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus}) {
    for (bool renormalize : {false, true}) {
      all.push_back({.score = score, .renormalize = renormalize, .scale = 2.5});
    }
  }
  // Floors above the sums of some tokens and below those of others.
  all.push_back({.scale = 2.5, .sum_floor = 0.3});
  all.push_back({.score = Score::sigmoid, .sum_floor = 3});
  all.push_back({.score = Score::sqrt_softplus, .sum_floor = 4});
  return all;
}

// Ids are the K largest of p + bias, in descending order, and scores follow from them.
void expect_right(Logits const& l, std::vector<int32_t> const& all_ids,
                  std::vector<double> const& scores, DType dtype) {
  std::vector<double> expected;
  for (int64_t t = 0; t < l.tokens; ++t) {
    std::vector<int32_t> const ids(all_ids.begin() + t * l.top_k,
                                   all_ids.begin() + (t + 1) * l.top_k);
    auto const key = keys_of(l, t);
    std::vector<double> sorted = key;
    std::sort(sorted.rbegin(), sorted.rend());
    for (int64_t k = 0; k < l.top_k; ++k) {
      ASSERT_TRUE(ids[k] >= 0 && ids[k] < l.experts) << "token " << t << " choice " << k;
      ASSERT_EQ(std::count(ids.begin(), ids.end(), ids[k]), 1) << "token " << t << " repeats";
      ASSERT_NEAR(key[ids[k]], sorted[k], 1e-6) << "token " << t << " choice " << k;
    }
    auto const w = scores_of(l, t, ids);
    expected.insert(expected.end(), w.begin(), w.end());
  }
  double const allowed = dtype == DType::float64 ? 1e-13 : 1e-6;
  EXPECT_LE(relative_error(scores, expected), allowed);
}

TEST_P(RouterTest, ChoosesTheLargest) {
  struct Size {
    int64_t tokens, experts, top_k;
  };
  Size const sizes[] = {{1, 1, 1},    {70, 8, 2},    {33, 40, 40}, {129, 128, 8},
                        {20, 384, 6}, {9, 1024, 32}, {0, 4, 2}};
  for (Router const& router : routers()) {
    for (Size const& s : sizes) {
      for (bool biased : {false, true}) {
        for (DType dtype : score_dtypes()) {
          SCOPED_TRACE(testing::Message() << "experts " << s.experts << " biased " << biased);
          Logits const l = random(s.tokens, s.experts, s.top_k, router, biased);
          auto const chosen = route(l, dtype);
          expect_right(l, chosen.ids, chosen.scores, dtype);
          auto const again = route(l, dtype);
          EXPECT_TRUE(chosen.ids == again.ids && chosen.scores == again.scores);
        }
      }
    }
  }
}

TEST_P(RouterTest, ChoosesInTheBestGroups) {
  struct Size {
    int64_t tokens, experts, top_k;
    int groups, top_groups;
  };
  Size const sizes[] = {{70, 256, 8, 8, 4},
                        {33, 12, 3, 4, 2},
                        {9, 1024, 32, 32, 8},
                        {20, 6, 2, 6, 3},
                        {5, 8, 4, 2, 2}};
  for (Router router : routers()) {
    for (Size const& s : sizes) {
      for (bool biased : {false, true}) {
        for (DType dtype : score_dtypes()) {
          SCOPED_TRACE(testing::Message() << "experts " << s.experts << " biased " << biased);
          router.groups = s.groups, router.top_groups = s.top_groups;
          for (GroupScore score : {GroupScore::top2_sum, GroupScore::max}) {
            router.group_score = score;
            Logits const l = random(s.tokens, s.experts, s.top_k, router, biased);
            auto const chosen = route(l, dtype);
            expect_right(l, chosen.ids, chosen.scores, dtype);
          }
        }
      }
    }
  }
}

// With more than 4,096 tokens and 65 to 128 experts the CUDA backend gives each token fewer lanes.
TEST_P(RouterTest, ManyTokens) {
  struct Size {
    int64_t experts, top_k;
    int groups, top_groups;
  };
  int case_number = 0;
  for (Size const& s : {Size{128, 8, 1, 1}, Size{67, 40, 1, 1}, Size{96, 6, 8, 3}}) {
    for (Router router : routers()) {
      SCOPED_TRACE(testing::Message() << "experts " << s.experts << " groups " << s.groups);
      router.groups = s.groups, router.top_groups = s.top_groups;
      bool const biased = ++case_number % 2 == 0;
      Logits l = random(4099, s.experts, s.top_k, router, biased);
      for (int64_t e = 0; e < s.experts; ++e) l.values(4097, e) = 0.5;  // all are equal
      auto const chosen = route(l, DType::float32);
      expect_right(l, chosen.ids, chosen.scores, DType::float32);
      if (biased) continue;
      std::vector<int32_t> first(s.top_k);
      std::iota(first.begin(), first.end(), 0);
      EXPECT_EQ(chosen.ids_of(4097, s.top_k), first);
    }
  }
}

TEST_P(RouterTest, PaddingGoesNowhere) {
  for (DType dtype : score_dtypes()) {
    Logits l = random(21, 40, 3, {}, false);
    auto const all = route(l, dtype);
    for (int64_t t = 0; t < l.tokens; ++t) l.token_mask.push_back(t % 3 != 1);
    auto const chosen = route(l, dtype);
    for (int64_t slot = 0; slot < l.tokens * 3; ++slot) {
      bool const real = slot / 3 % 3 != 1;
      EXPECT_EQ(chosen.ids[slot], real ? all.ids[slot] : -1);
      EXPECT_EQ(chosen.scores[slot], real ? all.scores[slot] : 0);
    }
  }
}

TEST_P(RouterTest, SlopesOfSigmoids) {  // 1 - p of the chosen, for the gradient
  Router const router{.score = Score::sigmoid, .scale = 2.5};
  for (DType dtype : score_dtypes()) {
    Logits l = random(40, 70, 5, router, true);
    for (int64_t e = 0; e < 70; ++e) l.values(3, e) = 20 + double(e);  // p rounds to 1
    auto const chosen = route(l, dtype);
    auto const expected = scores_and_slopes(l, chosen.ids).second;
    EXPECT_LE(relative_error(chosen.slopes, expected), dtype == DType::float64 ? 1e-13 : 1e-6);
    EXPECT_GT(chosen.slopes[3 * 5 + 4], 0);
    l.token_mask.assign(40, 1);
    l.token_mask[7] = 0;
    for (int k = 0; k < 5; ++k) EXPECT_EQ(route(l, dtype).slopes[7 * 5 + k], 0);
  }
}

TEST_P(RouterTest, WeightsOfTinyProbabilities) {  // renormalised: only ratios matter
  for (Router const& router : routers()) {
    if (!router.renormalize || router.sum_floor > 0) continue;
    Logits l = random(20, 12, 4, router, true);
    for (int64_t t = 0; t < l.tokens; ++t) {
      for (int64_t e = 0; e < 12; ++e) l.values(t, e) = -150 - double(e) / 4 + (e == 11 ? 140 : 0);
    }
    for (int64_t e = 0; e < 12; ++e) l.bias[e] = e < 4 ? 2 : -2;
    auto const chosen = route(l, DType::float32);
    expect_right(l, chosen.ids, chosen.scores, DType::float32);
  }
}

TEST_P(RouterTest, TiesGoToTheSmallerId) {
  for (Router const& router : routers()) {
    Logits l = random(3, 70, 5, router, false);
    for (int64_t e = 0; e < 70; ++e) {
      l.values(0, e) = 0.5;
      l.values(1, e) = e % 7 == 3 ? 2 : -1;
      l.values(2, e) = e == 69 ? 1 : 0.25;
    }
    auto const chosen = route(l, DType::float32);
    EXPECT_EQ(chosen.ids_of(0, 5), (std::vector<int32_t>{0, 1, 2, 3, 4}));
    EXPECT_EQ(chosen.ids_of(1, 5), (std::vector<int32_t>{3, 10, 17, 24, 31}));
    EXPECT_EQ(chosen.ids_of(2, 5), (std::vector<int32_t>{69, 0, 1, 2, 3}));
  }
}

TEST_P(RouterTest, NanComesLastAndIdsStayInRange) {
  for (Router const& router : routers()) {
    Logits l = random(3, 6, 4, router, false);
    for (int64_t e = 0; e < 6; ++e) l.values(0, e) = kNan, l.values(1, e) = double(e);
    l.values(1, 5) = l.values(1, 0) = l.values(1, 2) = kNan;
    l.values(2, 1) = INFINITY, l.values(2, 4) = -INFINITY;
    auto const chosen = route(l, DType::float32);
    EXPECT_EQ(chosen.ids_of(0, 4), (std::vector<int32_t>{0, 1, 2, 3}));
    EXPECT_TRUE(std::isnan(chosen.scores[0]));
    EXPECT_EQ(chosen.ids_of(1, 4), (std::vector<int32_t>{4, 3, 1, 0}));
    EXPECT_EQ(chosen.ids[8], 1);
    bool const poisoned = router.score == Score::softmax || router.renormalize;
    EXPECT_EQ(std::isnan(chosen.scores[4]), poisoned);  // of a token with NaN among its choices
    for (int32_t id : chosen.ids) EXPECT_TRUE(id >= 0 && id < 6) << id;
  }
}

// d(sum of scores * dscores) / dlogits by central differences in float64.
Matrix numeric_gradient(Logits l, std::vector<int32_t> const& ids, Matrix const& dscores) {
  double const step = 1e-5;
  Matrix gradient(l.tokens, l.experts);
  for (int64_t t = 0; t < l.tokens; ++t) {
    std::vector<int32_t> const chosen(ids.begin() + t * l.top_k, ids.begin() + (t + 1) * l.top_k);
    for (int64_t e = 0; e < l.experts; ++e) {
      double const x = l.values(t, e);
      double difference = 0;
      for (double sign : {1.0, -1.0}) {
        l.values(t, e) = x + sign * step;
        auto const w = scores_of(l, t, chosen);
        for (int64_t k = 0; k < l.top_k; ++k) difference += sign * w[k] * dscores(t, k);
      }
      l.values(t, e) = x;
      gradient(t, e) = difference / (2 * step);
    }
  }
  return gradient;
}

TEST_P(RouterTest, GradientIsTheDerivative) {
  for (Router const& router : routers()) {
    for (DType dtype : score_dtypes()) {
      Logits const l = random(40, 70, 5, router, false);
      auto ids = route(l, dtype).ids;
      ids[3] = 70, ids[11] = -1, ids[12] = 0x7fffffff;  // no gradient for these
      for (int k = 0; k < 5; ++k) ids[100 + k] = -1;    // padding
      Matrix dscores(l.tokens, l.top_k);
      std::normal_distribution<double> normal;
      for (double& v : dscores.values) v = float(normal(random_));
      Tensor logits(device(), dtype, l.tokens, l.experts),
          given(device(), dtype, l.tokens, l.top_k);
      logits.set(l.values.values);
      given.set(dscores.values);
      Indices<int32_t> const chosen(device(), ids);
      Tensor scores(device(), dtype, l.tokens, l.top_k), slopes(device(), dtype, l.tokens, l.top_k);
      auto const [of_slots, slopes_of_slots] = scores_and_slopes(l, ids);
      scores.set(of_slots);
      slopes.set(slopes_of_slots);
      bool const sloped = has_slopes(router), dense = needs_logits(router);
      Tensor out(device(), dtype, l.tokens, l.experts, l.experts + 2);
      device().run(RouterGradient{l.tokens, l.experts, l.top_k, dtype, router, chosen.data(),
                                  scores.data(), sloped ? slopes.data() : nullptr, given.data(),
                                  dense ? logits.view() : ConstRows(), out.view()});
      out.expect_untouched_from(l.tokens, "dlogits");
      double const allowed = dtype == DType::float64 ? 1e-8 : 2e-6;
      EXPECT_LE(relative_error(out.get(), numeric_gradient(l, ids, dscores).values), allowed);
    }
  }
}

// Where every p is 0: weights of 0, no gradient, no NaN.
TEST_P(RouterTest, NothingButMinusInfinity) {
  for (Router const& router : routers()) {
    if (router.score == Score::softmax) continue;
    for (DType dtype : score_dtypes()) {
      Logits l = random(5, 12, 3, router, false);
      for (double& v : l.values.values) v = -INFINITY;
      Chosen const chosen = route(l, dtype);
      double const slope = router.score == Score::sigmoid ? 1 : 0.5;
      for (double score : chosen.scores) EXPECT_EQ(score, 0);
      for (double s : chosen.slopes) EXPECT_EQ(s, slope);
    }
  }
}

GUILD_DEVICE_TESTS(RouterTest);

}  // namespace

}  // namespace guild::test
