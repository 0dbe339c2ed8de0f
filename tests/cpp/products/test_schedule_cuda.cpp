// How tiles are distributed over blocks: in which order, and with what results.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "cuda/sm90/forced_config.h"
#include "device.h"
#include "guild/cuda.h"
#include "layer.h"
#include "shared/gemm_config.h"

namespace guild::test {

namespace {

// A layer of the first activation in bfloat16, with experts of random sizes.
LayerParam layer_of(char const* name, Sizes const& sizes) {
  LayerParam p;
  p.shape.name = name, p.shape.routing = "random", p.shape.sizes = sizes;
  p.act = activations().front();
  p.dtype = DType::bfloat16, p.on_cuda = true;
  return p;
}

// A schedule in memory that notices stray writes.
struct ScheduleBuffers {
  Indices<int32_t> order, taken;
  ScheduleBuffers(Device& device, int64_t experts)
      : order(device, experts), taken(device, WeightSchedule::kCounters) {}

  WeightSchedule make(Sizes const& sizes, Routing const& routing) const {
    WeightSchedule const schedule{order.data(), taken.data()};
    cuda::schedule_weight_gradients(sizes, routing, schedule);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(order.canaries_alive() && taken.canaries_alive());
    return schedule;
  }
};

TEST(Cuda, SchedulePutsLongExpertsFirst) {
  char const* why = nullptr;
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  std::mt19937 random(5);
  for (int experts : {1, 7, 128, 300, 1024}) {
    std::vector<int32_t> ends(experts + 1), rows(experts), order(experts);
    for (int e = 0; e < experts; ++e) {
      rows[e] = random() % 3 == 0 ? 0 : int(random() % 50);
      ends[e + 1] = ends[e] + rows[e];
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rows[a] > rows[b]; });
    Indices<int32_t> const offsets(*device, ends);
    ScheduleBuffers const buffers(*device, experts);
    Sizes sizes;
    sizes.tokens = ends.back(), sizes.experts = experts, sizes.top_k = 1;
    Routing routing;
    routing.offsets = offsets.data();
    buffers.make(sizes, routing);
    EXPECT_EQ(buffers.order.get(), order) << experts << " experts";
    EXPECT_EQ(buffers.taken.get(), std::vector<int32_t>(WeightSchedule::kCounters));
  }
}

// Checked before anything is launched, so wherever the kernels are built.
TEST(WeightSchedule, MissingBuffersAndTooManyExpertsAreNamed) {
  int32_t memory[1] = {};
  Sizes sizes;
  sizes.tokens = 8, sizes.experts = 4, sizes.top_k = 1;
  Routing routing;
  routing.offsets = memory;
  WeightSchedule const whole{memory, memory};
  auto const expect_error = [](Sizes const& s, Routing const& r, WeightSchedule const& schedule,
                               char const* words) {
    try {
      cuda::schedule_weight_gradients(s, r, schedule);
      ADD_FAILURE() << "accepted without: " << words;
    } catch (Error const& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  expect_error(sizes, Routing{}, whole, "offsets: expected a buffer, got null");
  expect_error(sizes, routing, {nullptr, memory}, "order: expected a buffer, got null");
  expect_error(sizes, routing, {memory, nullptr}, "taken: expected a buffer, got null");
  sizes.experts = 1025;
  expect_error(sizes, routing, whole, "experts: expected at most 1024 on CUDA, got 1025");
  sizes.experts = 0;
  expect_error(sizes, routing, whole, "experts: expected 1 to 4096, got 0");
  sizes.experts = 4, sizes.tokens = -1;
  expect_error(sizes, routing, whole, "rows: expected 0 to 2147483647, got -1");
}

// dW2 = x^T a and dW1 = dh^T x, both of the rows of each expert.
void expect_weight_gradients(Layer const& l, Matrix const& x, Matrix const& dh, Matrix const& a,
                             Tensor const& dw_down, UpWeights const& dw_up) {
  Sizes const& s = l.s;
  DType const dtype = l.p.dtype;
  auto const truth = l.truth();
  auto const of_x = [&](int64_t r, int64_t j) { return x(truth.source(r), j); };
  auto const of_a = [&](int64_t r, int64_t i) { return a(r, i); };
  expect_close(
      dw_down.get(), truth.weight_gradient(s.hidden, s.intermediate, of_x, of_a, {}, dtype).values,
      l.yardstick().weight_gradient(s.hidden, s.intermediate, of_x, of_a, {}, dtype).values, dtype,
      "dw_down");
  for (bool const up : {false, true}) {
    auto const of_dh = [&](int64_t r, int64_t i) { return dh(r, truth.column(up, i)); };
    expect_close(
        dw_up.half(up).values,
        truth.weight_gradient(s.intermediate, s.hidden, of_dh, of_x, {}, dtype).values,
        l.yardstick().weight_gradient(s.intermediate, s.hidden, of_dh, of_x, {}, dtype).values,
        dtype, up ? "dw up" : "dw gate");
  }
}

// The distribution changes which block computes a tile, not its values.
TEST(Cuda, ScheduledWeightGradientsAreTheSame) {
  char const* why = nullptr;
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  LayerParam const p = layer_of("schedule", {900, 520, 328, 40, 3});
  Layer l(*device, p);
  Sizes const& s = l.s;
  auto const x = l.input(s.tokens, s.hidden), dh = l.input(s.rows(), p.width());
  auto const a = l.input(s.rows(), s.intermediate);
  Tensor dw_down(*device, p.dtype, s.experts * s.hidden, s.intermediate);
  UpWeights dw_up(*device, p, p.dtype);
  ScheduleBuffers const buffers(*device, s.experts);
  std::vector<std::byte> down, up;
  for (bool const scheduled : {false, true}) {
    dw_down.poison();
    dw_up.poison();
    WeightSchedule schedule{};
    if (scheduled) schedule = buffers.make(s, l.routing());
    cuda::down_weight_gradient(
        {s, p.dtype, p.dtype, false, l.routing(), x.view(), a.view(),
         Weight{dw_down.data(), s.hidden * s.intermediate, s.intermediate, 1}, schedule});
    cuda::up_weight_gradient({s, p.dtype, p.dtype, false, p.gated(), p.order(), l.routing(),
                              x.view(), dh.view(), dw_up.view(), schedule});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (!scheduled) {
      expect_weight_gradients(l, x.host, dh.host, a.host, dw_down, dw_up);
    }
    if (scheduled) {
      EXPECT_TRUE(down == dw_down.raw()) << "dw_down";
      EXPECT_TRUE(up == dw_up.raw()) << "dw_up";
      auto const taken = buffers.taken.get();
      EXPECT_GE(taken[0], s.experts * 3 * 2);  // a cluster's tiles are at most 256 x 256
      EXPECT_GE(taken[1], s.experts * 3 * 2);
    } else {
      down = dw_down.raw();
      up = dw_up.raw();
    }
  }
}

// Some of a layer's rows, evenly spread, to check products by row, which are too large here to
// compute again as a whole.
Rowing sample_of(Rowing const& all, int64_t count) {
  Rowing some;
  for (int64_t i = 0; i < count; ++i) {
    int64_t const row = i * (all.used() - 1) / (count - 1);
    some.row_expert.push_back(all.row_expert[row]);
    some.row_token.push_back(all.row_token[row]);
  }
  some.offsets = {0, int32_t(count)};
  return some;
}
Matrix sample_of(std::vector<double> const& values, int64_t used, int64_t cols, int64_t count) {
  Matrix some(count, cols);
  for (int64_t i = 0; i < count; ++i) {
    int64_t const row = i * (used - 1) / (count - 1);
    for (int64_t j = 0; j < cols; ++j) some(i, j) = values[row * cols + j];
  }
  return some;
}

// Every product by row of one layer, on a queue with or without a counter.
struct RowProducts {
  Layer l;
  Layer::Input x = l.input(l.s.tokens, l.s.hidden);
  Layer::Input up = l.input(l.s.experts * l.p.width(), l.s.hidden);
  Layer::Input down = l.input(l.s.experts * l.s.hidden, l.s.intermediate);
  Tensor h = l.output(l.s.rows(), l.p.width()), a = l.output(l.s.rows(), l.s.intermediate);
  Tensor y = l.output(l.s.rows(), l.s.hidden), dx = l.output(l.s.rows(), l.s.hidden);
  Tensor dh = l.output(l.s.rows(), l.p.width()), da = l.output(l.s.rows(), l.s.intermediate);
  Tensor db_up = l.output(l.s.experts, l.p.width()), db_down = l.output(l.s.experts, l.s.hidden);
  Bytes workspace{l.device, down_gradient_workspace_bytes(l.s, l.p.gated())};

  // The results, and what the counter then holds after each of the products.
  std::vector<std::vector<std::byte>> run(cuda::Queue queue, Indices<int32_t> const& counter,
                                          std::vector<int32_t>& counts) {
    Sizes const& s = l.s;
    LayerParam const& p = l.p;
    Routing const routing = l.routing();
    Activation const act = p.act.activation;
    auto const w_up =
        up_weight<ConstWeight>(up.view().data, s, p.gated(), p.order(), /*transposed=*/false, 2);
    ConstWeight const w_down{down.view().data, s.hidden * s.intermediate, s.intermediate, 1};
    auto const each = [&](auto const& step, auto const& args) {
      step(args, queue);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      counts.push_back(counter.get()[0]);
    };
    for (Tensor* tensor : {&h, &a, &y, &dx, &dh, &da, &db_up, &db_down}) tensor->poison();
    each(cuda::up_projection,
         UpProjection{s, p.dtype, act, p.order(), routing, x.view(), w_up, {}, h.view(), a.view()});
    each(cuda::down_projection,
         DownProjection{s, p.dtype, routing, a.view(), w_down, {}, y.view()});
    each(cuda::down_gradient, DownGradient{s, p.dtype, act, p.order(), routing, x.view(), w_down,
                                           h.view(), dh.view(), da.view(), nullptr, db_up.view(),
                                           db_down.view(), p.dtype, false, workspace.data()});
    each(cuda::up_gradient,
         UpGradient{s, p.dtype, p.gated(), p.order(), routing, h.view(), w_up, dx.view()});
    return {h.raw(), a.raw(), y.raw(), dx.raw(), dh.raw(), da.raw(), db_up.raw(), db_down.raw()};
  }

  // What the last run left, against the reference.
  void expect_right() const;
  void expect_right_biases() const;
};

void RowProducts::expect_right() const {
  constexpr int64_t kSample = 67;
  Sizes const& s = l.s;
  LayerParam const& p = l.p;
  Rowing const rows = sample_of(l.rowing, kSample);
  Reference<double> const truth{p, rows};
  Reference<float> const yardstick{p, rows};
  auto const of = [&](Tensor const& t) { return sample_of(t.get(), l.used(), t.cols(), kSample); };
  Matrix halves[2] = {Matrix(s.experts * s.intermediate, s.hidden),
                      Matrix(s.experts * s.intermediate, s.hidden)};
  for (int64_t row = 0; row < up.host.rows; ++row) {
    int64_t const e = row / p.width(), column = row % p.width(), i = column % s.intermediate;
    Matrix& half = halves[column / s.intermediate];
    for (int64_t j = 0; j < s.hidden; ++j) half(e * s.intermediate + i, j) = up.host(row, j);
  }
  Matrix const kept = of(h), scores = sample_of(l.row_scores.values, l.used(), 1, kSample);
  Matrix t[3], f[3];
  truth.up_projection(x.host, halves, {}, t[0], t[1]);
  yardstick.up_projection(x.host, halves, {}, f[0], f[1]);
  expect_close(kept.values, t[0].values, f[0].values, p.dtype, "h");
  expect_close(of(a).values, t[1].values, f[1].values, p.dtype, "a");
  expect_close(of(y).values, truth.down_projection(of(a), down.host, {}).values,
               yardstick.down_projection(of(a), down.host, {}).values, p.dtype, "y");
  truth.down_gradient(x.host, down.host, kept, scores, t[0], t[1], t[2]);
  yardstick.down_gradient(x.host, down.host, kept, scores, f[0], f[1], f[2]);
  expect_close(of(dh).values, t[0].values, f[0].values, p.dtype, "dh");
  expect_close(of(da).values, t[1].values, f[1].values, p.dtype, "a_scaled");
  expect_close(of(dx).values, truth.up_gradient(kept, halves).values,
               yardstick.up_gradient(kept, halves).values, p.dtype, "dx");
  expect_right_biases();
}

// db1 is the sum of what was stored of dH, db2 of s dO.
void RowProducts::expect_right_biases() const {
  auto const expect_sums = [&](Tensor const& db, auto const& value, char const* name) {
    std::vector<double> truth(db.rows() * db.cols());
    for (int64_t r = 0; r < l.used(); ++r) {
      double* const sums = &truth[l.rowing.row_expert[r] * db.cols()];
      for (int64_t j = 0; j < db.cols(); ++j) sums[j] += value(r, j);
    }
    std::vector<double> yardstick = truth;
    for (double& v : yardstick) v = round_to(l.p.dtype, v);
    expect_close(db.get(), truth, yardstick, l.p.dtype, name);
  };
  std::vector<double> const stored = dh.get();
  auto const of_dh = [&](int64_t r, int64_t j) { return stored[r * dh.cols() + j]; };
  auto const of_dout = [&](int64_t r, int64_t j) {
    return l.row_scores(r, 0) * x.host(l.rowing.row_token[r], j);
  };
  expect_sums(db_up, of_dh, "db_up");
  expect_sums(db_down, of_dout, "db_down");
}

TEST(Cuda, ProductsWithACounterAreTheSame) {
  char const* why = nullptr;
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  RowProducts products{Layer(*device, layer_of("counter", {8000, 1280, 1024, 4, 2}))};
  Indices<int32_t> const counter(*device, std::vector<int32_t>{77});  // whatever it holds before
  std::vector<int32_t> counts;
  auto const dealt = products.run({}, counter, counts);
  EXPECT_EQ(counts, std::vector<int32_t>(4, 77));
  products.expect_right();
  counts.clear();
  auto const taken = products.run({.counter = counter.data()}, counter, counts);
  for (size_t i = 0; i < taken.size(); ++i) EXPECT_TRUE(taken[i] == dealt[i]) << "result " << i;
  // Tiles of pairs of blocks, 256 x 256; no pair stops before it has found that there are no more.
  int32_t const row_tiles = 8000 * 2 / 256;
  int32_t const columns[] = {2048 / 256, 1280 / 256, 1024 / 256, 1280 / 256};
  for (int i = 0; i < 4; ++i) EXPECT_GT(counts[i], row_tiles * columns[i]) << "product " << i;
  EXPECT_TRUE(counter.canaries_alive());
}

// The counter tells what was claimed: every tile is claimed once, and each block or pair of blocks
// claims once more, in vain. Two multiprocessors are one pair; both experts have 700 rows.
TEST(Cuda, AForcedConfigIsTaken) {
  char const* why = nullptr;
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  RowProducts products{Layer(*device, layer_of("forced", {700, 520, 520, 2, 2}))};
  Indices<int32_t> counter(*device, 1);
  for (int config = 0; config < int(std::size(kConfigs)); ++config) {
    BuiltConfig const& built = kConfigs[config];
    counter.set({77});
    std::vector<int32_t> counts;
    cuda::forced_config = config;
    products.run({.sms = 2, .counter = counter.data()}, counter, counts);
    cuda::forced_config = -1;
    SCOPED_TRACE(testing::Message() << "config " << config);
    products.expect_right();
    if (!built.serves(Product::up) || !built.serves(Product::rows)) continue;
    int64_t const row_tiles = 2 * ceil_div(700, built.config.cluster_m());
    int64_t const columns[] = {2 * 520, 520, 520, 520};
    for (int i = 0; i < 4; ++i) {
      int64_t const tiles = row_tiles * ceil_div(columns[i], int64_t(built.config.tile_n));
      EXPECT_GT(counts[i], tiles) << "product " << i;
      EXPECT_LE(counts[i], tiles + 2) << "product " << i;
    }
  }
}

// Blocks alone claim tiles, too, where other kernels run at the same time.
TEST(Cuda, AllConfigsClaimSharedTiles) {
  char const* why = nullptr;
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  RowProducts products{Layer(*device, layer_of("shared", {700, 520, 520, 2, 2}))};
  Indices<int32_t> counter(*device, 1);
  for (int config = 0; config < int(std::size(kConfigs)); ++config) {
    SCOPED_TRACE(testing::Message() << "config " << config);
    counter.set({77});
    std::vector<int32_t> counts;
    cuda::forced_config = config;
    auto const dealt = products.run({.sms = 6}, counter, counts);
    EXPECT_EQ(counts, std::vector<int32_t>(4, 77));
    counts.clear();
    auto const claimed =
        products.run({.sms = 6, .counter = counter.data(), .shared = true}, counter, counts);
    cuda::forced_config = -1;
    for (size_t i = 0; i < claimed.size(); ++i) {
      EXPECT_TRUE(claimed[i] == dealt[i]) << "result " << i;
    }
    // An expert's tiles have at most 512 of its 700 rows, those of a pair of blocks, and 256 of 520
    // columns.
    for (int32_t count : counts) EXPECT_GE(count, 2 * 2 * 3);
  }
}

}  // namespace

}  // namespace guild::test
