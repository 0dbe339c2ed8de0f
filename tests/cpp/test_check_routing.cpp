// Wrong calls of the router, rounding, balancing, sorting and the bare grouped product.
#include <cmath>

#include "wrong_call.h"

namespace guild::test {

namespace {

std::vector<WrongCall> wrong_routers() {
  auto const route = [](char const* name, void (*spoil)(Route&), char const* message) {
    return wrong(name, &Calls::route, cpu::route, spoil, message);
  };
  auto const gradient = [](char const* name, void (*spoil)(RouterGradient&), char const* message) {
    return wrong(name, &Calls::router_gradient, cpu::router_gradient, spoil, message);
  };
  return {
      route(
          "top_k_above_experts", [](auto& x) { x.top_k = 9; }, "top_k: expected 1 to 8, got 9"),
      route(
          "logits_dtype", [](auto& x) { x.dtype = DType::bfloat16; },
          "dtype: expected float32 or float64, got bfloat16"),
      route(
          "logits_stride", [](auto& x) { x.logits.stride = 7; },
          "logits: expected a row stride of at least its width 8, or 0 for packed rows, got 7"),
      route(
          "score", [](auto& x) { x.router.score = Score(5); },
          "router.score: expected 0 (softmax) or 1 (sigmoid), got 5"),
      route(
          "scale", [](auto& x) { x.router.scale = NAN; },
          "router.scale: expected a finite number, got nan"),
      route(
          "groups", [](auto& x) { x.router.groups = 3; },
          "router.groups: expected a divisor of 8 (experts), got 3"),
      route(
          "most_groups", [](auto& x) { x.router.groups = 64; },
          "router.groups: expected 1 to 32, got 64"),
      route(
          "top_groups", [](auto& x) { x.router.groups = 4, x.router.top_groups = 5; },
          "router.top_groups: expected 1 to 4, got 5"),
      route(
          "candidates", [](auto& x) { x.top_k = 3, x.router.groups = 4; },
          "router.top_groups: expected groups of at least 3 experts (top_k), got 1 of 2"),
      route(
          "slopes",
          [](auto& x) {
            static float somewhere;
            x.slopes = &somewhere;
          },
          "slopes: expected null unless the router is a sigmoid or sqrt_softplus"),
      gradient(
          "kept_logits", [](auto& x) { x.logits = x.scores; },
          "logits: expected null unless the router is a softmax, not renormalised, or one with a "
          "sum_floor"),
      gradient(
          "no_logits", [](auto& x) { x.router.renormalize = false; },
          "logits: expected a pointer with a softmax, not renormalised, or one with a sum_floor, "
          "got "
          "null"),
      gradient(
          "rounded_to", [](auto& x) { x.rounded_to = DType::float64; },
          "rounded_to: expected float32, bfloat16 or float16, got float64"),
      gradient(
          "rounded_to_of_float64",
          [](auto& x) { x.dtype = DType::float64, x.rounded_to = DType::bfloat16; },
          "rounded_to: expected float32, got bfloat16"),
      gradient(
          "no_slopes", [](auto& x) { x.router.score = Score::sigmoid; },
          "slopes: expected a pointer with a sigmoid or sqrt_softplus, got null"),
  };
}

std::vector<WrongCall> wrong_rounding_sizes() {
  auto const round = [](char const* name, void (*spoil)(TokenRounding&), char const* message) {
    return wrong(name, &Calls::rounding, cpu::round_tokens, spoil, message);
  };
  return {
      round(
          "tokens", [](auto& x) { x.tokens = -1; }, "tokens: expected 0 to 2147483647, got -1"),
      round(
          "experts", [](auto& x) { x.experts = 0; }, "experts: expected 1 to 4096, got 0"),
      round(
          "top_k", [](auto& x) { x.top_k = 0; }, "top_k: expected 1 to 4096, got 0"),
      round(
          "rows", [](auto& x) { x.tokens = int64_t(1) << 30, x.top_k = 4; },
          "tokens * top_k: expected 0 to 2147483647, got 4294967296"),
      round(
          "dtype", [](auto& x) { x.dtype = DType::float16; },
          "dtype: expected float32 or float64, got float16"),
      round(
          "score", [](auto& x) { x.router.score = Score(2); },
          "router.score: expected 0 (softmax) or 1 (sigmoid), got 2"),
      round(
          "scale", [](auto& x) { x.router.scale = INFINITY; },
          "router.scale: expected a finite number, got inf"),
      round(
          "rounding", [](auto& x) { x.rounding = Rounding(5); },
          "rounding: expected 0 to 4, got 5"),
      round(
          "tile", [](auto& x) { x.tile = 0; }, "tile: expected 1 to 1048576, got 0"),
      round(
          "slots",
          [](auto& x) {
            x.rounding = Rounding::up, x.tile = 1 << 20;
            x.tokens = 1 << 28, x.experts = 4096, x.top_k = 4;
          },
          "tokens * top_k rounded to tiles: expected 0 to 2147483647, got 5368705024"),
  };
}

std::vector<WrongCall> wrong_rounding_memory() {
  auto const round = [](char const* name, void (*spoil)(TokenRounding&), char const* message) {
    return wrong(name, &Calls::rounding, cpu::round_tokens, spoil, message);
  };
  return {
      round(
          "logits", [](auto& x) { x.logits.data = nullptr; },
          "logits: expected 4 rows of 8, got null"),
      round(
          "logits_stride", [](auto& x) { x.logits.stride = 7; },
          "logits: expected a row stride of at least its width 8, or 0 for packed rows, got 7"),
      round(
          "ids", [](auto& x) { x.ids = nullptr; }, "ids: expected a pointer, got null"),
      round(
          "no_seed", [](auto& x) { x.rounding = Rounding::stochastic; },
          "seed: expected a pointer, got null"),
      round(
          "seed",
          [](auto& x) {
            static int64_t somewhere;
            x.seed = &somewhere;
          },
          "seed: expected null unless rounding is stochastic"),
      round(
          "token_offsets", [](auto& x) { x.token_offsets = nullptr; },
          "token_offsets: expected a pointer, got null"),
      round(
          "list_ids", [](auto& x) { x.list_ids = nullptr; },
          "list_ids: expected a pointer, got null"),
      round(
          "scores", [](auto& x) { x.scores = nullptr; }, "scores: expected a pointer, got null"),
      round(
          "slopes", [](auto& x) { x.slopes = x.scores; },
          "slopes: expected null unless the router is a sigmoid or sqrt_softplus"),
      round(
          "workspace", [](auto& x) { x.workspace = nullptr; },
          "workspace: expected a pointer, got null"),
  };
}

std::vector<WrongCall> wrong_balance_sums() {
  auto const balance = [](char const* name, void (*spoil)(BalanceSums&), char const* message) {
    return wrong(name, &Calls::balance, cpu::balance_sums, spoil, message);
  };
  return {
      balance(
          "tokens", [](auto& x) { x.tokens = -4; }, "tokens: expected 0 to 2147483647, got -4"),
      balance(
          "experts", [](auto& x) { x.experts = 4097; }, "experts: expected 1 to 4096, got 4097"),
      balance(
          "top_k", [](auto& x) { x.top_k = 0; }, "top_k: expected 1 to 4096, got 0"),
      balance(
          "no_sequences", [](auto& x) { x.sequences = 0; }, "sequences: expected 1 to 4, got 0"),
      balance(
          "sequences", [](auto& x) { x.sequences = 3; },
          "sequences: expected a divisor of 4 (tokens), got 3"),
      balance(
          "dtype", [](auto& x) { x.dtype = DType::bfloat16; },
          "dtype: expected float32 or float64, got bfloat16"),
      balance(
          "score", [](auto& x) { x.score = Score(7); },
          "router.score: expected 0 (softmax) or 1 (sigmoid), got 7"),
      balance(
          "logits", [](auto& x) { x.logits = {}; }, "logits: expected 4 rows of 8, got null"),
      balance(
          "ids", [](auto& x) { x.ids = nullptr; }, "ids: expected a pointer, got null"),
      balance(
          "shares", [](auto& x) { x.shares = nullptr; }, "shares: expected a pointer, got null"),
      balance(
          "squares", [](auto& x) { x.squares = nullptr; }, "squares: expected a pointer, got null"),
      balance(
          "counts", [](auto& x) { x.counts = nullptr; }, "counts: expected a pointer, got null"),
      balance(
          "workspace", [](auto& x) { x.workspace = nullptr; },
          "workspace: expected a pointer, got null"),
  };
}

std::vector<WrongCall> wrong_balance_gradients() {
  auto const gradient = [](char const* name, void (*spoil)(BalanceGradient&), char const* message) {
    return wrong(name, &Calls::balance_gradient, cpu::balance_gradient, spoil, message);
  };
  return {
      gradient(
          "tokens", [](auto& x) { x.tokens = -1; }, "tokens: expected 0 to 2147483647, got -1"),
      gradient(
          "experts", [](auto& x) { x.experts = 0; }, "experts: expected 1 to 4096, got 0"),
      gradient(
          "sequences", [](auto& x) { x.sequences = 5; }, "sequences: expected 1 to 4, got 5"),
      gradient(
          "dtype", [](auto& x) { x.dtype = DType::float16; },
          "dtype: expected float32 or float64, got float16"),
      gradient(
          "score", [](auto& x) { x.score = Score(-1); },
          "router.score: expected 0 (softmax) or 1 (sigmoid), got -1"),
      gradient(
          "logits", [](auto& x) { x.logits = {}; }, "logits: expected 4 rows of 8, got null"),
      gradient(
          "dshares", [](auto& x) { x.dshares = nullptr; }, "dshares: expected a pointer, got null"),
      gradient(
          "dsquares", [](auto& x) { x.dsquares = nullptr; },
          "dsquares: expected a pointer, got null"),
      gradient(
          "dlogits", [](auto& x) { x.dlogits.stride = 6; },
          "dlogits: expected a row stride of at least its width 8, or 0 for packed rows, got 6"),
  };
}

std::vector<WrongCall> wrong_routing() {
  auto const gemm = [](char const* name, void (*spoil)(GroupedGemm&), char const* message) {
    return wrong(name, &Calls::gemm, cpu::grouped_gemm, spoil, message);
  };
  return {
      wrong(
          "row_score", &Calls::sort, cpu::sort_by_expert, [](auto& x) { x.row_score = nullptr; },
          "row_score: expected a pointer, got null"),
      wrong(
          "sort_workspace", &Calls::sort, cpu::sort_by_expert,
          [](auto& x) { x.workspace = nullptr; }, "workspace: expected a pointer, got null"),
      gemm(
          "ragged", [](auto& x) { x.ragged = GroupedGemm::Ragged(4); },
          "ragged: expected 0 (rows), 1 (inner), 2 (columns) or 3 (none), got 4"),
      gemm(
          "n", [](auto& x) { x.n = -2; }, "n: expected 0 to 2147483647, got -2"),
      gemm(
          "groups", [](auto& x) { x.groups = 0; }, "groups: expected 1 to 4096, got 0"),
      gemm(
          "ends", [](auto& x) { x.offsets = nullptr; }, "offsets: expected a pointer, got null"),
      gemm(
          "out_dtype", [](auto& x) { x.out_dtype = DType::float64; },
          "out_dtype: expected bfloat16 or float32, got float64"),
      gemm(
          "b", [](auto& x) { x.b.row_stride = -8; },
          "b: expected strides of at least 0, got (128, -8, 1)"),
      gemm(
          "d", [](auto& x) { x.d.row_stride = x.d.col_stride = 0; },
          "d: expected strides of an output that does not overlap, got (0, 0, 0)"),
  };
}

TEST(Check, WrongRoutersAreNamed) { expect_errors(wrong_routers()); }

TEST(Check, WrongRoundingIsNamed) {
  expect_errors(wrong_rounding_sizes());
  expect_errors(wrong_rounding_memory());
}

TEST(Check, WrongBalancingIsNamed) {
  expect_errors(wrong_balance_sums());
  expect_errors(wrong_balance_gradients());
}

TEST(Check, WrongRoutingIsNamed) { expect_errors(wrong_routing()); }

}  // namespace

}  // namespace guild::test
