// Sums over tokens for balancing a router, and their gradient.
#include <cmath>
#include <random>

#include "device_test.h"
#include "reference.h"

namespace guild::test {

namespace {

struct Problem {
  int64_t tokens, experts, top_k, sequences;
  Score score;
  Matrix logits;
  std::vector<int32_t> ids;
  std::vector<uint8_t> token_mask;

  bool counts(int64_t token) const { return token_mask.empty() || token_mask[token] != 0; }
};

struct Sums {
  std::vector<double> shares, squares;
  std::vector<int32_t> counts;
};

// p of a token, and the logsumexp of its logits.
std::pair<std::vector<double>, double> shares_of(Problem const& x, Matrix const& logits,
                                                 int64_t token) {
  std::vector<double> p(x.experts);
  double sum = 0, sum_of_exp = 0;
  for (int64_t e = 0; e < x.experts; ++e) {
    double const l = logits(token, e);
    p[e] = x.score == Score::softmax   ? std::exp(l)
           : x.score == Score::sigmoid ? 1 / (1 + std::exp(-l))
           : l < -40                   ? std::exp(l / 2)
                                       : std::sqrt(std::log1p(std::exp(l)));
    sum += p[e];
    sum_of_exp += std::exp(l);
  }
  for (double& v : p) v /= sum;
  return {p, std::log(sum_of_exp)};
}

// Added up in F, one token after another.
template <class F>
Sums sums_of(Problem const& x, Matrix const& logits) {
  Sums out{std::vector<double>(x.sequences * x.experts), std::vector<double>(x.sequences),
           std::vector<int32_t>(x.sequences * x.experts)};
  for (int64_t t = 0; t < x.tokens; ++t) {
    if (!x.counts(t)) continue;
    int64_t const sequence = t / (x.tokens / x.sequences);
    auto const [p, lse] = shares_of(x, logits, t);
    for (int64_t e = 0; e < x.experts; ++e) {
      double& share = out.shares[sequence * x.experts + e];
      share = F(share + p[e]);
    }
    out.squares[sequence] = F(out.squares[sequence] + lse * lse);
    for (int64_t k = 0; k < x.top_k; ++k) {
      int32_t const id = x.ids[t * x.top_k + k];
      if (id >= 0 && id < x.experts) ++out.counts[sequence * x.experts + id];
    }
  }
  return out;
}

class BalanceTest : public DeviceTest {
 protected:
  std::vector<DType> score_dtypes() const {
    if (on_cuda()) return {DType::float32};
    return {DType::float32, DType::float64};
  }

  Problem random(int64_t tokens, int64_t experts, int64_t top_k, int64_t sequences, Score score) {
    Problem x{tokens, experts, top_k, sequences, score, Matrix(tokens, experts), {}, {}};
    for (double& v : x.logits.values) v = float(normal_(random_) * 2);
    for (int64_t i = 0; i < tokens * top_k; ++i) {  // a few of them outside
      x.ids.push_back(int32_t(random_() % (experts + 2)) - 1);
    }
    for (int64_t t = 0; t < tokens && top_k > 1; ++t) x.token_mask.push_back(t % 5 != 3);
    return x;
  }

  Sums sum(Problem const& x, DType dtype) {
    Tensor logits(device(), dtype, x.tokens, x.experts, x.experts + 3);
    logits.set(x.logits.values);
    Indices<int32_t> const ids(device(), x.ids);
    Indices<uint8_t> const mask(device(), x.token_mask);
    Tensor shares(device(), dtype, x.sequences, x.experts),
        squares(device(), dtype, x.sequences, 1);
    Indices<int32_t> counts(device(), x.sequences * x.experts);
    Bytes workspace(device(), balance_workspace_bytes(x.tokens, x.experts, x.sequences));
    device().run(BalanceSums{x.tokens, x.experts, x.top_k, x.sequences, dtype, x.score,
                             logits.view(), ids.data(),
                             x.token_mask.empty() ? nullptr : mask.data(), shares.data(),
                             squares.data(), counts.data(), workspace.data()});
    EXPECT_TRUE(counts.canaries_alive() && workspace.canaries_alive());
    shares.expect_untouched_from(x.sequences, "shares");
    squares.expect_untouched_from(x.sequences, "squares");
    return {shares.get(), squares.get(), counts.get()};
  }

  std::vector<double> gradient(Problem const& x, DType dtype, Matrix const& dshares,
                               Matrix const& dsquares) {
    Tensor logits(device(), dtype, x.tokens, x.experts);
    Tensor out(device(), dtype, x.tokens, x.experts, x.experts + 2);
    Tensor dp(device(), dtype, x.sequences, x.experts), dq(device(), dtype, x.sequences, 1);
    logits.set(x.logits.values);
    dp.set(dshares.values);
    dq.set(dsquares.values);
    Indices<uint8_t> const mask(device(), x.token_mask);
    device().run(BalanceGradient{x.tokens, x.experts, x.sequences, dtype, x.score, logits.view(),
                                 x.token_mask.empty() ? nullptr : mask.data(), dp.data(), dq.data(),
                                 out.view()});
    out.expect_untouched_from(x.tokens, "dlogits");
    return out.get();
  }

  std::vector<Problem> problems() {
    std::vector<Problem> all;
    for (Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus}) {
      all.push_back(random(1, 1, 1, 1, score));
      all.push_back(random(90, 8, 2, 3, score));
      all.push_back(random(1000, 70, 1, 1, score));
      all.push_back(random(700, 128, 4, 350, score));
      all.push_back(random(40, 1024, 8, 2, score));
    }
    return all;
  }

  std::mt19937_64 random_{5};
  std::normal_distribution<double> normal_;
};

TEST_P(BalanceTest, Sums) {
  for (Problem const& x : problems()) {
    for (DType dtype : score_dtypes()) {
      SCOPED_TRACE(testing::Message() << x.tokens << " tokens, " << x.experts << " experts");
      Sums const expected = sums_of<double>(x, x.logits);
      Sums const got = sum(x, dtype), again = sum(x, dtype);
      double const allowed = dtype == DType::float64 ? 1e-13 : 1e-6;
      EXPECT_EQ(got.counts, expected.counts);
      EXPECT_LE(relative_error(got.shares, expected.shares), allowed);
      EXPECT_LE(relative_error(got.squares, expected.squares), allowed);
      EXPECT_TRUE(got.shares == again.shares && got.squares == again.squares);
    }
  }
}

// More tokens than the blocks of a GPU take at once, in one sequence and in several.
TEST_P(BalanceTest, ManyTokens) {
  for (Score score : {Score::softmax, Score::sigmoid}) {
    for (Problem const& x : {random(5003, 70, 2, 1, score), random(4500, 300, 3, 1, score),
                             random(40000, 8, 2, 2, score)}) {
      SCOPED_TRACE(testing::Message() << x.tokens << " tokens, " << x.experts << " experts");
      Sums const expected = sums_of<double>(x, x.logits), got = sum(x, DType::float32);
      Sums const yardstick = sums_of<float>(x, x.logits);
      EXPECT_EQ(got.counts, expected.counts);
      expect_close(got.shares, expected.shares, yardstick.shares, DType::float32, "shares");
      expect_close(got.squares, expected.squares, yardstick.squares, DType::float32, "squares");
    }
  }
}

// Shares of experts whose logits are so low that float32 has no exp of them.
TEST_P(BalanceTest, FarBelowZero) {
  Problem x{1, 3, 1, 1, Score::sqrt_softplus, Matrix(1, 3), {0}, {}};
  x.logits.values = {1, -120, -165};
  double const p = std::sqrt(std::log1p(std::exp(1.0)));
  auto const shares = sum(x, DType::float32).shares;
  EXPECT_NEAR(shares[1] / (std::exp(-60.0) / p), 1, 1e-6);
  EXPECT_NEAR(shares[2] / (std::exp(-82.5) / p), 1, 1e-6);
}

TEST_P(BalanceTest, NoTokens) {
  for (int64_t const sequences : {1, 5}) {
    Problem const x = random(0, 12, 2, sequences, Score::softmax);
    for (DType dtype : score_dtypes()) {
      Sums const got = sum(x, dtype);
      EXPECT_EQ(got.counts, std::vector<int32_t>(sequences * 12));
      EXPECT_EQ(got.shares, std::vector<double>(sequences * 12));
      EXPECT_EQ(got.squares, std::vector<double>(sequences));
      EXPECT_TRUE(gradient(x, dtype, Matrix(sequences, 12), Matrix(sequences, 1)).empty());
    }
  }
}

// d(sum of shares * dshares + squares * dsquares) / dlogits by central differences.
Matrix numeric_gradient(Problem const& x, Matrix const& dshares, Matrix const& dsquares) {
  double const step = 1e-5;
  Matrix out(x.tokens, x.experts), logits = x.logits;
  for (int64_t t = 0; t < x.tokens; ++t) {
    int64_t const sequence = t / (x.tokens / x.sequences);
    for (int64_t e = 0; x.counts(t) && e < x.experts; ++e) {
      for (double sign : {1.0, -1.0}) {
        logits(t, e) = x.logits(t, e) + sign * step;
        auto const [p, lse] = shares_of(x, logits, t);
        double value = lse * lse * dsquares(sequence, 0);
        for (int64_t i = 0; i < x.experts; ++i) value += p[i] * dshares(sequence, i);
        out(t, e) += sign * value / (2 * step);
      }
      logits(t, e) = x.logits(t, e);
    }
  }
  return out;
}

TEST_P(BalanceTest, GradientIsTheDerivative) {
  for (Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus}) {
    for (DType dtype : score_dtypes()) {
      Problem const x = random(60, 70, 2, 3, score);
      Matrix dshares(3, 70), dsquares(3, 1);
      for (double& v : dshares.values) v = float(normal_(random_));
      for (double& v : dsquares.values) v = float(normal_(random_) / 10);
      auto const got = gradient(x, dtype, dshares, dsquares);
      double const allowed = dtype == DType::float64 ? 1e-8 : 3e-6;
      EXPECT_LE(relative_error(got, numeric_gradient(x, dshares, dsquares).values), allowed);
    }
  }
}

GUILD_DEVICE_TESTS(BalanceTest);

}  // namespace

}  // namespace guild::test
