// The router with logits that are far apart or not numbers, and with a scale of zero. Expected
// results are written by hand.
#include <cmath>
#include <limits>

#include "device_test.h"

namespace guild::test {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Row = std::vector<double>;

class RouterEdges : public DeviceTest {
 protected:
  std::vector<DType> score_dtypes() const {
    if (on_cuda()) return {DType::float32};
    return {DType::float32, DType::float64};
  }

  struct Chosen {
    std::vector<int32_t> ids;
    std::vector<double> scores;
  };

  // Of one token.
  Chosen route(Row const& row, int64_t top_k, Router const& router, DType dtype,
               Row const& bias = {}) const {
    int64_t const experts = int64_t(row.size());
    Tensor logits(device(), dtype, 1, experts), added(device(), dtype, 1, experts);
    logits.set(row);
    if (!bias.empty()) added.set(bias);
    Indices<int32_t> ids(device(), top_k);
    Tensor scores(device(), dtype, 1, top_k);
    device().run(Route{1, experts, top_k, dtype, router, logits.view(),
                       bias.empty() ? nullptr : added.data(), ids.data(), scores.data()});
    return {ids.get(), scores.get()};
  }
};

// A group whose two largest keys have no sum ranks below every other group.
TEST_P(RouterEdges, GroupsWithoutASumComeLast) {
  struct Case {
    Row logits;
    int64_t top_k;
    std::vector<int32_t> ids;
  };
  Case const cases[] = {
      {{5, kNan, 1, 0, kNan, kNan, -1, -2}, 3, {2, 3, 6}},
      {{-1, -2, kNan, 7, 1, 0, kNan, kNan}, 3, {4, 5, 0}},
      {{kNan, 9, kNan, 8, -3, -4, kNan, 7}, 3, {1, 4, 5}},  // the second best is then the first
      {{kNan, kNan, kNan, kNan, kNan, 2, kNan, kNan}, 3, {0, 1, 2}},
  };
  for (DType dtype : score_dtypes()) {
    for (Case const& c : cases) {
      Router const router{.score = Score::sigmoid, .groups = 4, .top_groups = 2};
      EXPECT_EQ(route(c.logits, c.top_k, router, dtype).ids, c.ids);
      EXPECT_EQ(route(c.logits, c.top_k, router, dtype, Row(8, 0.25)).ids, c.ids) << "biased";
    }
  }
}

// A softmax is over all experts, so one NaN among them leaves no weight; sigmoids stand alone.
TEST_P(RouterEdges, NanAmongTheUnchosen) {
  for (int64_t experts : {6, 40, 130}) {
    for (int64_t at : {int64_t(0), experts / 2, experts - 1}) {
      Row row(experts, -1);
      row[1] = 3, row[4] = 2, row[at] = kNan;
      for (DType dtype : score_dtypes()) {
        for (bool renormalize : {false, true}) {
          SCOPED_TRACE(testing::Message() << "NaN at " << at << " of " << experts
                                          << (renormalize ? ", renormalised" : ""));
          auto const softmax = route(row, 2, {.renormalize = renormalize}, dtype);
          EXPECT_EQ(softmax.ids, (std::vector<int32_t>{1, 4}));
          for (double score : softmax.scores) EXPECT_TRUE(std::isnan(score)) << score;
          auto const sigmoid =
              route(row, 2, {.score = Score::sigmoid, .renormalize = renormalize}, dtype);
          EXPECT_EQ(sigmoid.ids, (std::vector<int32_t>{1, 4}));
          double const p[] = {1 / (1 + std::exp(-3.0)), 1 / (1 + std::exp(-2.0))};
          for (int k : {0, 1}) {
            EXPECT_NEAR(sigmoid.scores[k], p[k] / (renormalize ? p[0] + p[1] : 1), 1e-6);
          }
        }
      }
    }
  }
}

// The same of the lists that rounding leaves, which here are the choices: their tiles are 1 row.
TEST_P(RouterEdges, NanAmongTheUnlisted) {
  constexpr int64_t kTokens = 70, kExperts = 5, kSpoilt = 33;
  Row values(kTokens * kExperts);
  std::vector<int32_t> ids(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) {
    ids[t] = int32_t(t % kExperts);
    for (int64_t e = 0; e < kExperts; ++e) values[t * kExperts + e] = double((t + e) % 3) / 2;
  }
  values[kSpoilt * kExperts + (kSpoilt + 2) % kExperts] = kNan;
  for (DType dtype : score_dtypes()) {
    for (bool renormalize : {false, true}) {
      Tensor logits(device(), dtype, kTokens, kExperts), scores(device(), dtype, kTokens, 1);
      logits.set(values);
      Indices<int32_t> const chosen(device(), ids);
      Indices<int32_t> begins(device(), kTokens + 1), list_ids(device(), kTokens);
      Bytes workspace(device(), rounding_workspace_bytes(kTokens, kExperts));
      ASSERT_EQ(rounded_slots(kTokens, kExperts, 1, Rounding::down, 1), kTokens);
      Router const router{.renormalize = renormalize};
      device().run(TokenRounding{kTokens, kExperts, 1, dtype, router, Rounding::down, /*tile=*/1,
                                 logits.view(), chosen.data(), nullptr, begins.data(),
                                 list_ids.data(), scores.data(), nullptr, workspace.data()});
      EXPECT_EQ(list_ids.get(), ids);
      auto const weights = scores.get();
      for (int64_t t = 0; t < kTokens; ++t) {
        EXPECT_EQ(std::isnan(weights[t]), t == kSpoilt) << "token " << t << ": " << weights[t];
      }
    }
  }
}

// exp(logit - top) of a choice far below the top is tiny, but a number; exp(top - logit) is none.
TEST_P(RouterEdges, ABiasChoosesFarBelowTheTop) {
  Router const router{.renormalize = false};
  auto const of_last_two = [&](double below, DType dtype) {
    Row const row{below, 0, -1, below + 1};
    return route(row, 2, router, dtype, {4, 0, 0, 8});
  };
  double const sum = 1 + std::exp(-1.0);
  for (DType dtype : score_dtypes()) {
    auto const some = of_last_two(-80, dtype);
    EXPECT_EQ(some.ids, (std::vector<int32_t>{3, 0}));
    EXPECT_NEAR(some.scores[0] / (std::exp(-79.0) / sum), 1, 1e-5);
    EXPECT_NEAR(some.scores[1] / (std::exp(-80.0) / sum), 1, 1e-5);
    // Beyond what exp can reach upwards, and still reaches downwards as subnormal numbers.
    double const below = dtype == DType::float64 ? -720 : -95;
    auto const far = of_last_two(below, dtype);
    EXPECT_EQ(far.ids, (std::vector<int32_t>{3, 0}));
    double const expected[] = {std::exp(below + 1) / sum, std::exp(below) / sum};
    for (int k : {0, 1}) {
      EXPECT_NEAR(far.scores[k] / expected[k], 1, 0.01);
    }
  }
}

// sqrt(log(1 + exp(logit))) is exp(logit / 2) far below 0, a number where exp(logit) is none.
TEST_P(RouterEdges, SqrtSoftplusFarBelowZero) {
  constexpr int64_t kExperts = 4;
  Router const router{.score = Score::sqrt_softplus, .renormalize = false};
  for (DType dtype : score_dtypes()) {
    bool const wide = dtype == DType::float64;
    for (double const top : wide ? Row{-60, -720, -1300} : Row{-60, -95, -110, -165}) {
      SCOPED_TRACE(testing::Message() << "logits up to " << top << ", dtype " << int(dtype));
      Row const row{top - 2, top - 1, top, top - 3};
      Tensor logits(device(), dtype, 1, kExperts), scores(device(), dtype, 1, kExperts);
      Tensor slopes(device(), dtype, 1, kExperts), dscores(device(), dtype, 1, kExperts);
      Tensor dlogits(device(), dtype, 1, kExperts);
      logits.set(row);
      dscores.set({1, -2, 3, 4});
      Indices<int32_t> ids(device(), kExperts);
      device().run(Route{1, kExperts, kExperts, dtype, router, logits.view(), nullptr, ids.data(),
                         scores.data(), nullptr, slopes.data()});
      EXPECT_EQ(ids.get(), (std::vector<int32_t>{2, 1, 0, 3}));
      device().run(RouterGradient{1,
                                  kExperts,
                                  kExperts,
                                  dtype,
                                  router,
                                  ids.data(),
                                  scores.data(),
                                  slopes.data(),
                                  dscores.data(),
                                  {},
                                  dlogits.view()});
      double const allowed = wide ? 1e-13 : 1e-6;
      for (int k = 0; k < kExperts; ++k) {
        int const e = ids.get()[k];
        double const p = std::exp(row[e] / 2), d = p / 2 * dscores.get()[k];
        EXPECT_NEAR(scores.get()[k] / p, 1, allowed) << "choice " << k;
        EXPECT_NEAR(slopes.get()[k], 0.5, allowed) << "choice " << k;
        EXPECT_NEAR(dlogits.get()[e] / d, 1, allowed) << "expert " << e;
      }
      // Divided by their sum, beside a choice whose p is near 1.
      Row const beside{0, top};
      Row const weights = route(beside, 2, {.score = Score::sqrt_softplus}, dtype).scores;
      double const p = std::exp(top / 2), sum = std::sqrt(std::log(2.0)) + p;
      EXPECT_NEAR(weights[1] / (p / sum), 1, allowed);
      // And beside one that is far below 0 too.
      Row const below = route({-50, top - 50}, 2, {.score = Score::sqrt_softplus}, dtype).scores;
      EXPECT_NEAR(below[1] / below[0] / p, 1, allowed);
    }
  }
}

// With a scale of zero, scores and their gradients are zero whatever the logits are.
TEST_P(RouterEdges, ScaleZeroHasNoGradient) {
  constexpr int64_t kTokens = 9, kExperts = 12, kTopK = 3;
  Row values(kTokens * kExperts), dvalues(kTokens * kTopK);
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(i * 7 % 11) / 4 - 1;
  for (size_t i = 0; i < dvalues.size(); ++i) dvalues[i] = double(i % 5) - 1.5;
  for (Score score : {Score::softmax, Score::sigmoid}) {
    for (bool renormalize : {false, true}) {
      for (DType dtype : score_dtypes()) {
        SCOPED_TRACE(testing::Message() << int(score) << renormalize << int(dtype));
        Router const router{.score = score, .renormalize = renormalize, .scale = 0};
        bool const sloped = score == Score::sigmoid, dense = !sloped && !renormalize;
        Tensor logits(device(), dtype, kTokens, kExperts), scores(device(), dtype, kTokens, kTopK);
        Tensor slopes(device(), dtype, kTokens, kTopK), dscores(device(), dtype, kTokens, kTopK);
        Tensor dlogits(device(), dtype, kTokens, kExperts);
        logits.set(values);
        dscores.set(dvalues);
        Indices<int32_t> ids(device(), kTokens * kTopK);
        device().run(Route{kTokens, kExperts, kTopK, dtype, router, logits.view(), nullptr,
                           ids.data(), scores.data(), nullptr, sloped ? slopes.data() : nullptr});
        EXPECT_EQ(scores.get(), Row(kTokens * kTopK));
        device().run(RouterGradient{kTokens, kExperts, kTopK, dtype, router, ids.data(),
                                    scores.data(), sloped ? slopes.data() : nullptr, dscores.data(),
                                    dense ? logits.view() : ConstRows(), dlogits.view()});
        EXPECT_EQ(dlogits.get(), Row(kTokens * kExperts));
      }
    }
  }
}

GUILD_DEVICE_TESTS(RouterEdges);

}  // namespace

}  // namespace guild::test
