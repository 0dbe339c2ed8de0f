// The router's part of dX in Combine: any number of experts and slots, lists, missing rows. Also
// the gradients of the logits that it is computed from, rounded when they are written.
#include <random>

#include "device_test.h"
#include "reference.h"

namespace guild::test {

namespace {

struct RouterCase {
  int64_t tokens, hidden, experts, top_k;
  bool lists = false;
};

// 700 and 4000 experts do not fit shared memory with 256 columns of each; 40 slots are more than a
// warp has lanes; 264 columns are two slices, 136 and 128, of which lanes have 8.
constexpr RouterCase kCases[] = {
    {50, 264, 7, 3},   {33, 2048, 128, 8}, {20, 520, 700, 40},    {3, 8, 1, 1},
    {500, 256, 16, 4}, {40, 64, 4000, 6},  {60, 128, 9, 2, true}, {17, 4104, 3, 2},
};

class CombineRouter : public DeviceTest {
 protected:
  Matrix random(int64_t rows, int64_t cols, DType dtype) {
    std::normal_distribution<double> normal;
    Matrix m(rows, cols);
    for (double& v : m.values) v = round_to(dtype, normal(random_));
    return m;
  }
  // From -1 to `high`.
  std::vector<int32_t> indices(int64_t count, int64_t high) {
    std::uniform_int_distribution<int64_t> any(-1, high);
    std::vector<int32_t> all(count);
    for (int32_t& i : all) i = int32_t(any(random_));
    return all;
  }
  // Where each token's slots begin: K each, or lists of 0 to 70, then slots of nobody.
  std::vector<int32_t> starts(RouterCase const& c) {
    std::uniform_int_distribution<int> any(0, 70);
    std::vector<int32_t> at{0};
    for (int64_t t = 0; t < c.tokens; ++t) {
      at.push_back(at.back() + (c.lists ? any(random_) : int(c.top_k)));
    }
    return at;
  }
  void check(RouterCase const& c, DType dtype);

  std::mt19937 random_{7};
};

void CombineRouter::check(RouterCase const& c, DType dtype) {
  std::vector<int32_t> const at = starts(c);
  int64_t const slots = at.back() + (c.lists ? 5 : 0), rows = slots;
  Matrix const y = random(rows, c.hidden, dtype), weight = random(c.experts, c.hidden, dtype);
  Matrix const dlogits = random(c.tokens, c.experts, dtype);
  Matrix const residual = random(c.tokens, c.hidden, dtype);
  auto const row = indices(slots, rows - 1), id = indices(slots, c.experts);

  auto const tensor = [&](Matrix const& m, int64_t more) {
    Tensor t(device(), dtype, m.rows, m.cols, m.cols + more);
    t.set(m.values);
    return t;
  };
  Tensor const y_in = tensor(y, 8), weight_in = tensor(weight, 8), dlogits_in = tensor(dlogits, 3);
  Tensor const residual_in = tensor(residual, 16);
  Indices<int32_t> const rows_in(device(), row), ids_in(device(), id), lists_in(device(), at);
  Combine step;
  step.sizes = {c.tokens, c.hidden, 1, c.experts, c.top_k};
  if (c.lists) step.sizes.slots = slots, step.routing.token_offsets = lists_in.data();
  step.dtype = dtype;
  step.routing.slot_row = rows_in.data();
  step.y = y_in.view(), step.residual = residual_in.view();
  step.router = {dlogits_in.view(), ids_in.data(), weight_in.view()};
  Tensor out(device(), dtype, c.tokens, c.hidden, c.hidden + 8);
  step.o = out.view();
  device().run(step);
  out.expect_untouched_from(c.tokens, "o");
  auto const first = out.raw();
  out.poison();
  device().run(step);
  EXPECT_TRUE(first == out.raw()) << "two runs differ";

  std::vector<double> const got = out.get();
  double const rounding = dtype == DType::float64   ? 1e-13
                          : dtype == DType::float32 ? 1e-6
                          : dtype == DType::float16 ? 1e-3
                                                    : 8e-3;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t j = 0; j < c.hidden; ++j) {
      double sum = residual(t, j), size = std::abs(sum);
      for (int64_t slot = at[t]; slot < at[t + 1]; ++slot) {
        double const a = row[slot] < 0 ? 0 : y(row[slot], j);
        bool const chosen = id[slot] >= 0 && id[slot] < c.experts;
        double const b = chosen ? dlogits(t, id[slot]) * weight(id[slot], j) : 0;
        sum += a + b, size += std::abs(a) + std::abs(b);
      }
      // Rounded once, summed in fp32.
      ASSERT_NEAR(got[t * c.hidden + j], sum, rounding * std::abs(sum) + 1e-6 * size)
          << "token " << t << ", column " << j;
    }
  }
}

TEST_P(CombineRouter, IsTheSumOfBoth) {
  for (RouterCase const& c : kCases) {
    for (DType dtype : dtypes()) {
      SCOPED_TRACE(testing::Message() << c.tokens << " tokens, " << c.hidden << " columns, "
                                      << c.experts << " experts, type " << int(dtype));
      check(c, dtype);
    }
  }
}

GUILD_DEVICE_TESTS(CombineRouter);

class RoundedLogits : public DeviceTest {};

TEST_P(RoundedLogits, AreTheOthersRounded) {
  constexpr int64_t kTokens = 40, kTopK = 3;
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  auto const scores_of = [&](int64_t count) {
    std::vector<double> values(count);
    for (double& v : values) v = float(normal(random));
    return values;
  };
  for (int64_t experts : {5, 16, 70, 128, 1000}) {  // 70: rows of no multiple of 8 bytes
    Tensor scores(device(), DType::float32, kTokens, kTopK);
    Tensor dscores(device(), DType::float32, kTokens, kTopK);
    scores.set(scores_of(kTokens * kTopK));
    dscores.set(scores_of(kTokens * kTopK));
    std::vector<int32_t> ids(kTokens * kTopK);
    for (int64_t i = 0; i < kTokens * kTopK; ++i) ids[i] = int32_t((i * 7) % experts);
    Indices<int32_t> const chosen(device(), ids);
    Tensor exact(device(), DType::float32, kTokens, experts, experts + 2);
    RouterGradient step{kTokens,       experts,       kTopK,   DType::float32, {},
                        chosen.data(), scores.data(), nullptr, dscores.data(), {},
                        exact.view()};
    device().run(step);
    for (DType narrow : {DType::bfloat16, DType::float16}) {
      Tensor rounded(device(), narrow, kTokens, experts, experts + 2);
      step.dlogits = rounded.view(), step.rounded_to = narrow;
      device().run(step);
      rounded.expect_untouched_from(kTokens, "dlogits");
      std::vector<double> expected = exact.get();
      for (double& v : expected) v = round_to(narrow, v);
      EXPECT_TRUE(rounded.get() == expected) << experts << " experts, type " << int(narrow);
    }
  }
}

GUILD_DEVICE_TESTS(RoundedLogits);

}  // namespace

}  // namespace guild::test
