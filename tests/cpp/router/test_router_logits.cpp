// The router's product: against sums in float64, with the same bits whatever the other tokens, and
// followed by the choice of experts.
#include <random>

#include "device_test.h"
#include "guild/router_logits.h"
#include "reference.h"
#include "shared/router_product.h"
#include "wrong_call.h"

namespace guild::test {

namespace {

struct LogitsCase {
  int64_t tokens, hidden, experts;
  int groups = 1;
};

// Sums of one chunk and of several, complete or not; tiles of every shape, full or not. The last
// has few tokens and more tiles of 16 experts than there are multiprocessors.
constexpr LogitsCase kCases[] = {{1, 8, 1},      {70, 72, 5},     {300, 520, 37},  {9, 4104, 60},
                                 {200, 2880, 8}, {33, 1024, 520}, {1100, 256, 16}, {67, 4160, 61},
                                 {130, 64, 40},  {4, 4160, 433}};

class RouterProduct : public DeviceTest {
 protected:
  Tensor random(DType dtype, int64_t rows, int64_t cols, int64_t stride, std::vector<double>& to) {
    std::normal_distribution<double> normal;
    to.resize(rows * cols);
    for (double& v : to) v = round_to(dtype, normal(random_));
    Tensor t(device(), dtype, rows, cols, stride);
    t.set(to);
    return t;
  }
  void run(RouterLogits const& x) const {
    on_cuda() ? cuda::router_logits(x) : cpu::router_logits(x);
  }
  // The logits of tokens first .. first + count.
  std::vector<double> logits(RouterLogits x, int64_t first, int64_t count, int64_t row_bytes) {
    DType const dtype = x.dtype == DType::float64 ? DType::float64 : DType::float32;
    Tensor out(device(), dtype, count, x.experts, x.experts + 3);
    Bytes const workspace(device(),
                          router_logits_workspace_bytes(count, x.hidden, x.experts, x.dtype));
    x.tokens = count;
    x.x = {static_cast<char const*>(x.x.data) + first * row_bytes, x.x.stride};
    x.logits = out.view(), x.workspace = workspace.data();
    run(x);
    out.expect_untouched_from(count, "logits");
    EXPECT_TRUE(workspace.canaries_alive());
    return out.get();
  }
  void check(LogitsCase const& c, DType dtype);

  std::mt19937 random_{5};
};

void RouterProduct::check(LogitsCase const& c, DType dtype) {
  std::vector<double> x, w;
  Tensor const x_in = random(dtype, c.tokens, c.hidden, c.hidden + 8, x);
  Tensor const w_in = random(dtype, c.experts, c.hidden, c.hidden + 16, w);
  RouterLogits args;
  args.hidden = c.hidden, args.experts = c.experts, args.dtype = dtype;
  args.x = x_in.view(), args.weight = w_in.view();
  int64_t const row_bytes = (c.hidden + 8) * bytes_of(dtype);
  auto const all = logits(args, 0, c.tokens, row_bytes);

  DType const wide = dtype == DType::float64 ? DType::float64 : DType::float32;
  std::vector<double> bias, wide_bias;
  Tensor const bias_in = random(dtype, 1, c.experts, 0, bias);
  Tensor const wide_in = random(wide, 1, c.experts, 0, wide_bias);
  RouterLogits biased = args, with_wide = args;
  biased.bias = bias_in.view().data, biased.bias_dtype = dtype;
  with_wide.bias = wide_in.view().data, with_wide.bias_dtype = wide;
  auto const all_biased = logits(biased, 0, c.tokens, row_bytes);
  auto const all_wide = logits(with_wide, 0, c.tokens, row_bytes);

  double const unit = dtype == DType::float64 ? 0x1p-52 : 0x1p-23;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t e = 0; e < c.experts; ++e) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < c.hidden; ++k) {
        double const product = x[t * c.hidden + k] * w[e * c.hidden + k];
        sum += product, size += std::abs(product);
      }
      double const allowed = unit * size * (4 + double(router_chunk(c.hidden)) / 16);
      int64_t const at = t * c.experts + e;
      ASSERT_NEAR(all[at], sum, allowed) << "token " << t << ", expert " << e;
      ASSERT_NEAR(all_biased[at], sum + bias[e], allowed + unit * 16 * std::abs(bias[e]));
      ASSERT_NEAR(all_wide[at], sum + wide_bias[e], allowed + unit * 16 * std::abs(wide_bias[e]));
    }
  }
  for (int64_t const count : {1, 2, 9, 31, 64, 65, 130}) {
    if (count > c.tokens) break;
    for (int64_t const first : {int64_t(0), (c.tokens - count) / 2, c.tokens - count}) {
      auto const some = logits(args, first, count, row_bytes);
      EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + first * c.experts))
          << count << " tokens from " << first;
      auto const more = logits(biased, first, count, row_bytes);
      EXPECT_TRUE(std::equal(more.begin(), more.end(), all_biased.begin() + first * c.experts))
          << count << " tokens from " << first << ", with a bias";
    }
  }
}

TEST_P(RouterProduct, IsTheSumAndHasItsBitsInAnyCompany) {
  for (LogitsCase const& c : kCases) {
    for (DType const dtype : dtypes()) {
      SCOPED_TRACE(text_of(c.tokens, " tokens of ", c.hidden, ", ", c.experts, " experts, dtype ",
                           int(dtype)));
      check(c, dtype);
    }
  }
}

// The last one needs more shared memory for a token than any other.
constexpr LogitsCase kRouted[] = {{5, 1160, 12},       {31, 2056, 130}, {9, 1152, 300},
                                  {7, 1152, 40},       {300, 4096, 64}, {40, 64, 600},
                                  {1400, 1472, 400, 5}};

TEST_P(RouterProduct, RoutesAsRouteDoes) {
  for (LogitsCase const& c : kRouted) {
    DType const dtype = dtypes().back();
    DType const wide = dtype == DType::float64 ? DType::float64 : DType::float32;
    std::vector<double> values;
    Tensor const x_in = random(dtype, c.tokens, c.hidden, 0, values);
    Tensor const w_in = random(dtype, c.experts, c.hidden, 0, values);
    Bytes const workspace(device(),
                          router_logits_workspace_bytes(c.tokens, c.hidden, c.experts, dtype));
    Bytes const gate_workspace(device(),
                               router_logits_workspace_bytes(c.tokens, c.hidden, 1, dtype));
    RouterLogits product{.tokens = c.tokens,
                         .hidden = c.hidden,
                         .experts = c.experts,
                         .dtype = dtype,
                         .x = x_in.view(),
                         .weight = w_in.view(),
                         .logits = {},
                         .workspace = workspace.data()};
    Tensor const bias = random(dtype, 1, c.experts, 0, values);
    Tensor const selection_bias = random(wide, 1, c.experts, 0, values);
    if (c.tokens % 2 == 1) product.bias = bias.view().data, product.bias_dtype = dtype;
    Tensor const gate = random(dtype, 1, c.hidden, 0, values);
    Tensor const gates[2] = {Tensor(device(), wide, c.tokens, 1),
                             Tensor(device(), wide, c.tokens, 1)};
    std::vector<double> scores[2];
    std::vector<int32_t> chosen[2];
    for (bool const together : {false, true}) {
      Tensor const logits(device(), wide, c.tokens, c.experts), out(device(), wide, c.tokens, 4);
      Indices<int32_t> const ids(device(), std::vector<int32_t>(c.tokens * 4, -7));
      Route route;
      route.tokens = c.tokens, route.experts = c.experts, route.top_k = 4, route.dtype = wide;
      route.ids = ids.data(), route.scores = out.view().data;
      if (c.groups > 1) {
        route.router = {.score = Score::sigmoid, .groups = c.groups, .top_groups = 2};
        route.selection_bias = selection_bias.view().data;
      }
      if (together) {
        product.logits = {};
        product.gate = gate.view(), product.gate_score = gates[1].view().data;
        product.gate_workspace = gate_workspace.data();
        on_cuda() ? cuda::route_tokens(product, route) : cpu::route_tokens(product, route);
      } else {
        product.logits = logits.view(), route.logits = logits.view();
        run(product);
        device().run(route);
      }
      scores[together] = out.get(), chosen[together] = ids.get();
    }
    product.gate_score = gates[0].view().data;
    run(gate_of(product));
    EXPECT_EQ(gates[0].get(), gates[1].get());
    EXPECT_EQ(chosen[0], chosen[1]);
    EXPECT_EQ(scores[0], scores[1]);
  }
}

TEST_P(RouterProduct, GivesAGatesScores) {
  for (LogitsCase const& c : {LogitsCase{5, 64, 1}, LogitsCase{40, 1160, 1}, {300, 4096, 3}}) {
    for (DType const dtype : dtypes()) {
      std::vector<double> values;
      Tensor const x_in = random(dtype, c.tokens, c.hidden, 0, values);
      Tensor const w_in = random(dtype, c.experts, c.hidden, 0, values);
      RouterLogits args{.tokens = c.tokens,
                        .hidden = c.hidden,
                        .experts = c.experts,
                        .dtype = dtype,
                        .x = x_in.view(),
                        .weight = w_in.view(),
                        .logits = {}};
      auto const plain = logits(args, 0, c.tokens, 0);
      args.sigmoid = true;
      auto const scores = logits(args, 0, c.tokens, 0);
      double const allowed = dtype == DType::float64 ? 0x1p-50 : 0x1p-21;
      for (size_t i = 0; i < plain.size(); ++i) {
        double const expected = 1 / (1 + std::exp(-plain[i]));
        ASSERT_NEAR(scores[i], expected, allowed * expected + 1e-37) << "logit " << plain[i];
      }
    }
  }
}

GUILD_DEVICE_TESTS(RouterProduct);

TEST(RouterTile, IsSplitWhereTokensAreFew) {
  EXPECT_TRUE(choose_router_tile(1, 2048, 128).split);
  EXPECT_TRUE(choose_router_tile(64, 7168, 256).split);
  EXPECT_EQ(choose_router_tile(64, 7168, 256).experts, 16);  // the tile of few_for_router()
  EXPECT_FALSE(choose_router_tile(32768, 2048, 128).split);
  EXPECT_FALSE(choose_router_tile(1, 2048, 1000).split);  // no router adds so many chunks
  EXPECT_EQ(choose_router_tile(1, 2048, 128).tokens, 64);
  EXPECT_EQ(choose_router_tile(16384, 7168, 256).experts, 128);
}

// The fastest in bench/results/2026-11-23-h200-router-tiles.json, where others take a quarter more.
TEST(RouterTile, IsTheFastestMeasured) {
  auto const expect = [](int64_t tokens, int64_t hidden, int64_t experts, RouterTile const& best) {
    RouterTile const tile = choose_router_tile(tokens, hidden, experts);
    EXPECT_TRUE(tile.tokens == best.tokens && tile.experts == best.experts &&
                tile.split == best.split)
        << tokens << " tokens, " << hidden << ", " << experts << " experts: " << tile.tokens
        << " x " << tile.experts << (tile.split ? " split" : "");
  };
  expect(4096, 7168, 256, {64, 128, false});
  expect(8192, 7168, 256, {128, 128, false});
  expect(8192, 2048, 128, {64, 128, false});
  expect(8192, 2880, 128, {64, 128, false});
  expect(8192, 2048, 64, {64, 64, false});
  expect(16384, 4096, 8, {64, 16, false});
}

TEST(Check, RouterLogits) {
  WrongCalls<RouterLogits> const wrong(&Calls::router_logits, cpu::router_logits,
                                       cuda::router_logits);
  wrong.size("tokens", &RouterLogits::tokens, 0, 2147483647);
  wrong.size("hidden", &RouterLogits::hidden, 1, 1073741760);
  wrong.size("experts", &RouterLogits::experts, 1, 4096);
  wrong.dtype("dtype", &RouterLogits::dtype);
  wrong.rows("x", &RouterLogits::x, 4, 16);
  wrong.rows("weight", &RouterLogits::weight, 8, 16);
  wrong.optional_rows("logits", &RouterLogits::logits, 8);
  wrong.workspace("workspace", &RouterLogits::workspace, 256);
  wrong.optional_rows("gate", &RouterLogits::gate, 16);
  wrong.expect("bias_dtype: expected bfloat16 or float32, got float16",
               [](RouterLogits& x) { x.bias = x.workspace, x.bias_dtype = DType::float16; });
  wrong.expect("bias: expected an address that 4 divides, got one that leaves 2",
               [](RouterLogits& x) { x.bias = static_cast<char*>(x.workspace) + 2; });
}

TEST(Check, RouteTokens) {
  Calls calls;
  auto const expect = [&](char const* message, auto&& spoil) {
    RouterLogits product = calls.router_logits();
    Route route = calls.route();
    product.logits = {}, route.logits = {};
    spoil(product, route);
    try {
      cpu::route_tokens(product, route);
      ADD_FAILURE() << "no error: " << message;
    } catch (Error const& error) {
      EXPECT_STREQ(error.what(), message);
    }
  };
  expect("product.logits: expected null because logits are not kept",
         [&](auto& p, auto&) { p.logits.data = calls.memory; });
  expect("product.sigmoid: expected false because the router takes logits",
         [](auto& p, auto&) { p.sigmoid = true; });
  auto const with_gate = [&](char* score, char* workspace) {
    return [=, &calls](auto& p, auto&) {
      p.gate = {calls.memory}, p.gate_score = score, p.gate_workspace = workspace;
    };
  };
  expect("gate_score: expected a pointer, got null", with_gate(nullptr, calls.memory));
  expect("gate_workspace: expected 256 bytes, got null", with_gate(calls.memory, nullptr));
  expect("gate_workspace: expected an address that 16 divides, got one that leaves 4",
         with_gate(calls.memory, calls.memory + 4));
  expect("logits: expected null because the product computes them",
         [&](auto&, auto& r) { r.logits = {calls.memory}; });
  expect("tokens: expected 4 as in the product, got 3", [](auto&, auto& r) { r.tokens = 3; });
  expect("experts: expected 8 as in the product, got 9", [](auto&, auto& r) { r.experts = 9; });
  expect("dtype: expected float32 like the product's logits, got float64",
         [](auto&, auto& r) { r.dtype = DType::float64; });
}

}  // namespace

}  // namespace guild::test
