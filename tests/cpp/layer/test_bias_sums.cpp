// Bias gradients that the down gradient computes: sums of dH as it was stored, and of s dO,
// whatever lies in rows of other experts.
#include <limits>

#include "layer_test.h"

namespace guild::test {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class BiasSums : public LayerTest {
 protected:
  void SetUp() override {
    LayerTest::SetUp();
    Layer& l = layer();
    LayerParam const& p = l.p;
    dout_ = l.random(l.input_rows(), l.s.hidden, 1, p.dtype);
    h_ = l.random(l.s.rows(), p.width(), 1, p.dtype);
    std::vector<bool> read(dout_.rows);
    for (int64_t r = 0; r < l.used(); ++r) read[l.truth().source(r)] = true;
    for (int64_t r = 0; r < dout_.rows; ++r) {
      if (!read[r]) spoil(dout_, r);
    }
    for (int64_t r = l.used(); r < h_.rows; ++r) spoil(h_, r);
    dout_there_ = l.input_of(dout_, p.dtype, true);
    h_there_ = l.input_of(h_, p.dtype, true);
    w_down_ = l.input(l.s.experts * l.s.hidden, l.s.intermediate, 1 / std::sqrt(double(l.s.hidden)),
                      false);
    dh_.emplace(l.output(l.s.rows(), p.width()));
    a_.emplace(l.output(l.s.rows(), l.s.intermediate));
    workspace_.emplace(l.device, down_gradient_workspace_bytes(l.s, p.gated()));
  }

  static void spoil(Matrix& m, int64_t row) {
    for (int64_t j = 0; j < m.cols; ++j) m(row, j) = kNan;
  }

  // The step without its bias gradients.
  DownGradient plain() {
    Layer& l = layer();
    LayerParam const& p = l.p;
    DownGradient step;
    step.sizes = l.s, step.dtype = p.dtype, step.activation = p.act.activation;
    step.order = p.order(), step.routing = l.routing();
    step.dout = dout_there_.view(), step.h = h_there_.view();
    step.w_down = {w_down_.view().data, l.s.hidden * l.s.intermediate, l.s.intermediate, 1};
    step.dh = dh_->view(), step.a_scaled = a_->view();
    return step;
  }
  // ... with them.
  DownGradient with(Tensor const& db_up, Tensor const& db_down, bool accumulate = false) {
    DownGradient step = plain();
    step.db_up = db_up.view(), step.db_down = db_down.view();
    step.db_dtype = db_up.dtype(), step.accumulate = accumulate;
    step.workspace = workspace_->data();
    return step;
  }
  Tensor biases(int64_t width, DType stored) {
    return {layer().device, stored, layer().s.experts, width};
  }

  void expect_sums(DownGradient const& step, Matrix const& scores, Tensor& db_up, Tensor& db_down,
                   Matrix const& up_before, Matrix const& down_before);

  Matrix dout_, h_;
  Layer::Input dout_there_, h_there_, w_down_;
  std::optional<Tensor> dh_, a_;
  std::optional<Bytes> workspace_;
};

class BiasSumLayouts : public BiasSums {};

// Runs the step; scores are by row, `before` is what it adds to, empty if it does not add.
void BiasSums::expect_sums(DownGradient const& step, Matrix const& scores, Tensor& db_up,
                           Tensor& db_down, Matrix const& up_before, Matrix const& down_before) {
  Layer& l = layer();
  bool const adds = step.accumulate;
  run_twice(step, {&*dh_, &*a_, &db_up, &db_down}, [&] {
    dh_->poison(), a_->poison();
    adds ? db_up.set(up_before.values) : db_up.poison();
    adds ? db_down.set(down_before.values) : db_down.poison();
  });
  db_up.expect_untouched_from(l.s.experts, "db_up");
  db_down.expect_untouched_from(l.s.experts, "db_down");
  EXPECT_TRUE(workspace_->canaries_alive()) << "workspace: written past its ends";
  auto const dh = used_rows(*dh_, "dh");
  int64_t const width = l.p.width();
  auto const one = [](int64_t, int64_t) { return 1.0; };
  auto const score = [&](int64_t r, int64_t) { return scores.rows > 0 ? scores(r, 0) : 1.0; };
  auto const from_dh = [&](int64_t r, int64_t j) { return dh[r * width + j]; };
  auto const from_dout = [&](int64_t r, int64_t j) { return dout_(l.truth().source(r), j); };
  auto const expect = [&](Tensor const& db, auto left, auto right, Matrix const& before,
                          char const* name) {
    auto const truth = l.truth().weight_gradient(1, db.cols(), left, right, before, db.dtype());
    auto const yard = l.yardstick().weight_gradient(1, db.cols(), left, right, before, db.dtype());
    auto const out = db.get();
    expect_close(out, truth.values, yard.values, db.dtype(), name);
    for (int64_t e = 0; e < l.s.experts; ++e) {  // nothing added: exact, not merely close
      if (l.rowing.offsets[e] != l.rowing.offsets[e + 1]) continue;
      for (int64_t i = e * db.cols(); i < (e + 1) * db.cols(); ++i) {
        ASSERT_EQ(out[i], adds ? before.values[i] : 0) << name << " of an expert without rows";
      }
    }
  };
  expect(db_up, one, from_dh, up_before, "db_up");
  expect(db_down, score, from_dout, down_before, "db_down");
}

TEST_P(BiasSumLayouts, AreThoseOfTheRows) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  for (bool const add : {false, true}) {
    DType const stored = add ? DType::float32 : p.dtype;
    auto const before = [&](int64_t width) {
      return add ? l.random(l.s.experts, width, 3, stored) : Matrix();
    };
    Tensor up = biases(p.width(), stored), down = biases(l.s.hidden, stored);
    expect_sums(with(up, down, add), l.row_scores, up, down, before(p.width()), before(l.s.hidden));
  }
}

TEST_P(BiasSums, ChangeNothingElse) {
  Layer& l = layer();
  Tensor up = biases(l.p.width(), l.p.dtype), down = biases(l.s.hidden, l.p.dtype);
  run_twice(plain(), {&*dh_, &*a_});
  auto const dh = dh_->raw(), a = a_->raw();
  run_twice(with(up, down), {&*dh_, &*a_, &up, &down});
  EXPECT_TRUE(dh == dh_->raw() && a == a_->raw()) << "dh or a_scaled differs beside the sums";
  auto const db_up = up.raw(), db_down = down.raw();
  DownGradient alone = with(up, down);
  alone.db_down = {};
  run_twice(alone, {&up});
  EXPECT_TRUE(db_up == up.raw()) << "db_up differs when it alone is asked for";
  alone = with(up, down);
  alone.db_up = {};
  run_twice(alone, {&down});
  EXPECT_TRUE(db_down == down.raw()) << "db_down differs when it alone is asked for";
}

TEST_P(BiasSums, WithoutScores) {
  Layer& l = layer();
  Tensor up = biases(l.p.width(), l.p.dtype), down = biases(l.s.hidden, l.p.dtype);
  DownGradient step = with(up, down);
  step.routing.row_score = nullptr;
  expect_sums(step, {}, up, down, {}, {});
}

TEST_P(BiasSums, OfScoresOfAnySize) {  // a power of two changes no digit
  Layer& l = layer();
  Tensor up = biases(l.p.width(), DType::float32), down = biases(l.s.hidden, DType::float32);
  std::vector<double> first;
  for (double const scale : {1.0, 0x1p-24, 0x1p18}) {
    Matrix scores = l.row_scores;
    for (double& s : scores.values) s *= scale;
    auto const there = l.input_of(scores, l.score_dtype(), false);
    DownGradient step = with(up, down);
    step.routing.row_score = there.view().data;
    run_twice(step, {&down});
    auto db = down.get();
    for (double& v : db) v /= scale;
    if (first.empty()) first = db;
    EXPECT_EQ(db, first) << "scores times " << scale;
  }
}

TEST_P(BiasSums, HaveEveryBitOfAScore) {  // where an expert has but one row, nothing else rounds
  Layer& l = layer();
  Tensor up = biases(l.p.width(), DType::float32), down = biases(l.s.hidden, DType::float32);
  l.device.run(with(up, down));
  auto const db = down.get();
  for (int64_t e = 0; e < l.s.experts; ++e) {
    int64_t const row = l.rowing.offsets[e];
    if (l.rowing.offsets[e + 1] - row != 1) continue;
    for (int64_t j = 0; j < l.s.hidden; ++j) {
      double const exact = l.row_scores(row, 0) * dout_(l.truth().source(row), j);
      EXPECT_NEAR(db[e * l.s.hidden + j], exact, std::abs(exact) * 0x1p-22) << "expert " << e;
    }
  }
}

TEST_P(BiasSums, InfinitiesStayInfinite) {  // of a score, and of dO
  Layer& l = layer();
  if (l.used() == 0) return;
  Tensor up = biases(l.p.width(), DType::float32), down = biases(l.s.hidden, DType::float32);
  int64_t const row = l.used() - 1, expert = l.rowing.row_expert[row];
  auto const expect = [&](Matrix const& scores, char const* name) {
    auto const there = l.input_of(scores, l.score_dtype(), false);
    DownGradient step = with(up, down);
    step.routing.row_score = there.view().data;
    l.device.run(step);
    auto const db = down.get();
    for (int64_t j = 0; j < l.s.hidden; ++j) {
      double sum = 0;
      for (int64_t r = l.rowing.offsets[expert]; r < l.rowing.offsets[expert + 1]; ++r) {
        sum += scores(r, 0) * dout_(l.truth().source(r), j);
      }
      double const got = db[expert * l.s.hidden + j];
      if (std::isinf(sum)) {
        EXPECT_EQ(got, sum) << name << " column " << j;
      }
    }
  };
  for (double const sign : {1., -1.}) {
    Matrix scores = l.row_scores;
    scores(row, 0) = sign * INFINITY;
    expect(scores, "score");
  }
  dout_(l.truth().source(row), 0) = INFINITY;
  dout_there_.device->set(dout_.values);
  expect(l.row_scores, "dO");
}

TEST_P(BiasSums, OfHugeGradients) {  // whose scaled terms float32 does not hold
  Layer& l = layer();
  if (l.p.dtype == DType::float16) return;  // which has no such values
  for (double& v : dout_.values) v *= 0x1p116;
  dout_there_.device->set(dout_.values);
  Tensor up = biases(l.p.width(), DType::float32), down = biases(l.s.hidden, DType::float32);
  expect_sums(with(up, down), l.row_scores, up, down, {}, {});
}

TEST_P(BiasSums, NanStaysInItsExpert) {
  Layer& l = layer();
  if (l.used() == 0) return;  // no row to spoil
  Tensor up = biases(l.p.width(), l.p.dtype), down = biases(l.s.hidden, l.p.dtype);
  l.device.run(with(up, down));
  auto const clean_up = up.get(), clean_down = down.get();
  // The first row of the last expert with rows: next to the ragged end of the expert before it.
  int64_t const last = l.rowing.row_expert[l.used() - 1], spoilt = l.rowing.offsets[last];
  int64_t const source = l.truth().source(spoilt);
  spoil(dout_, source), spoil(h_, spoilt);
  dout_there_.device->set(dout_.values), h_there_.device->set(h_.values);
  std::vector<bool> reached(l.s.experts);
  for (int64_t r = 0; r < l.used(); ++r) {
    if (l.truth().source(r) == source) reached[l.rowing.row_expert[r]] = true;
  }
  l.device.run(with(up, down));
  auto const dirty_up = up.get(), dirty_down = down.get();
  auto const expect = [&](auto const& dirty, auto const& clean, int64_t width, char const* name) {
    for (int64_t i = 0; i < l.s.experts * width; ++i) {
      if (reached[i / width]) continue;
      ASSERT_EQ(dirty[i], clean[i]) << name << " of expert " << i / width;
    }
    EXPECT_TRUE(std::isnan(dirty[last * width])) << name << ": NaN was lost";
  };
  expect(dirty_up, clean_up, l.p.width(), "db_up");
  expect(dirty_down, clean_down, l.s.hidden, "db_down");
}

// Long sums. In the configs of pairs of blocks they have tiles of both blocks, of one, apart,
// ragged in each, and rows of nobody at the end.
std::vector<LayerParam> long_sums() {
  char const* why = "";
  std::vector<LayerParam> all;
  if (cuda_device(&why) == nullptr) return all;
  for (bool const sorted : {false, true}) {
    for (int const kind : {0, 1}) {
      for (DType const dtype : {DType::bfloat16, DType::float16}) {
        LayerParam p;
        p.shape.name = sorted ? "pairs_sorted" : "pairs";
        p.shape.sorted = sorted;
        p.shape.routing = "300|128|0|70|513|256|192|1|129|31";  // the last rows have no expert
        p.shape.sizes = {1620, 1280, 520, 9, 1};
        p.act = activations()[kind];
        p.layout = kind == 0 ? Layout::concatenated : Layout::interleaved;
        p.dtype = dtype, p.on_cuda = true;
        all.push_back(p);
      }
    }
  }
  return all;
}

GUILD_LAYER_TESTS(BiasSums, false);
GUILD_LAYER_TESTS(BiasSumLayouts, true);
INSTANTIATE_TEST_SUITE_P(Long, BiasSums, testing::ValuesIn(long_sums()),
                         [](auto const& info) { return info.param.name(); });
INSTANTIATE_TEST_SUITE_P(Long, BiasSumLayouts, testing::ValuesIn(long_sums()),
                         [](auto const& info) { return info.param.name(); });

}  // namespace

}  // namespace guild::test
