// Wrong calls of the router, rounding, balancing, sorting and the bare grouped product.
#include <cmath>

#include "wrong_call.h"

namespace guild::test {

namespace {

float somewhere;
int64_t some_seed;

constexpr int64_t kMostRows = 2147483647;

// Tokens that choose at most `most` experts; 4096 where a choice may be repeated.
template <class Args>
void expect_slots(WrongCalls<Args> const& wrong, int64_t most = 4096) {
  wrong.size("tokens", &Args::tokens, 0, kMostRows);
  wrong.size("experts", &Args::experts, 1, 4096);
  wrong.size("top_k", &Args::top_k, 1, most);
  wrong.expect("tokens * top_k: expected 0 to 2147483647, got 4294967296",
               [](Args& x) { x.tokens = int64_t(1) << 30, x.top_k = 4; });
}

template <class Args>
void expect_lists(WrongCalls<Args> const& wrong) {
  wrong.lists(&Args::slots, &Args::token_offsets);
}

template <class Args, class Of>
void expect_score(WrongCalls<Args> const& wrong, Of of) {
  for (int const score : {-1, 3}) {
    wrong.expect(
        text_of("router.score: expected 0 (softmax), 1 (sigmoid) or 2 (sqrt_softplus), got ",
                score),
        [&](Args& x) { std::invoke(of, x) = Score(score); });
  }
}

constexpr char const* kRange = "float32's normal range, got ";

template <class Args>
void expect_router(WrongCalls<Args> const& wrong) {
  expect_score(wrong, [](Args& x) -> auto& { return x.router.score; });
  for (double const scale : {double(NAN), double(INFINITY), 1e-39, 1e39}) {
    wrong.expect(text_of("router.scale: expected 0 or a number in ", kRange, scale),
                 [=](Args& x) { x.router.scale = scale; });
  }
  for (double const floor : {-0.5, double(NAN), double(INFINITY), 1e-39}) {
    wrong.expect(text_of("router.sum_floor: expected 0 or a positive number in ", kRange, floor),
                 [=](Args& x) { x.router.sum_floor = floor; });
  }
  wrong.expect("router.sum_floor: expected 0 without renormalize, got 0.5",
               [](Args& x) { x.router.renormalize = false, x.router.sum_floor = 0.5; });
}

// Every score except softmax has slopes.
template <class Args>
void expect_no_slopes(WrongCalls<Args> const& wrong) {
  wrong.expect("slopes: expected null unless the router is a sigmoid or sqrt_softplus",
               [](Args& x) { x.slopes = &somewhere; });
}

template <class Args>
void expect_sequences(WrongCalls<Args> const& wrong) {
  wrong.size("sequences", &Args::sequences, 1, 4);
  wrong.expect("sequences: expected a divisor of 4 (tokens), got 3",
               [](Args& x) { x.sequences = 3; });
  for (int64_t const sequences : {int64_t(0), kMostRows + 1}) {
    wrong.expect(text_of("sequences: expected 1 to 2147483647, got ", sequences),
                 [=](Args& x) { x.tokens = 0, x.sequences = sequences; });
  }
}

TEST(Check, Route) {
  WrongCalls<Route> const wrong(&Calls::route, cpu::route, cuda::route);
  expect_slots(wrong, 8);
  wrong.score_dtype("dtype", &Route::dtype);
  expect_router(wrong);
  wrong.rows("logits", &Route::logits, 4, 8);
  wrong.pointer("ids", &Route::ids);
  wrong.pointer("scores", &Route::scores);
  expect_no_slopes(wrong);
}

TEST(Check, GroupsOfRoute) {
  WrongCalls<Route> const wrong(&Calls::route, cpu::route, cuda::route);
  wrong.size("router.groups", [](Route& x) -> auto& { return x.router.groups; }, 1, 32);
  wrong.expect("router.groups: expected a divisor of 8 (experts), got 3",
               [](auto& x) { x.router.groups = 3; });
  for (int const top_groups : {0, 5}) {
    wrong.expect(text_of("router.top_groups: expected 1 to 4, got ", top_groups),
                 [=](auto& x) { x.router.groups = 4, x.router.top_groups = top_groups; });
  }
  wrong.expect("router.group_score: expected 0 (top2_sum) or 1 (max), got 2",
               [](auto& x) { x.router.group_score = GroupScore(2); });
  wrong.expect("router.top_groups: expected groups of at least 3 experts (top_k), got 1 of 2",
               [](auto& x) { x.top_k = 3, x.router.groups = 4; });
}

TEST(Check, RouterGradient) {
  WrongCalls<RouterGradient> const wrong(&Calls::router_gradient, cpu::router_gradient,
                                         cuda::router_gradient);
  expect_slots(wrong);
  expect_lists(wrong);
  wrong.score_dtype("dtype", &RouterGradient::dtype);
  expect_router(wrong);
  wrong.pointer("ids", &RouterGradient::ids);
  wrong.pointer("scores", &RouterGradient::scores);
  wrong.pointer("dscores", &RouterGradient::dscores);
  expect_no_slopes(wrong);
  wrong.expect("slopes: expected a pointer with a sigmoid or sqrt_softplus, got null",
               [](auto& x) { x.router.score = Score::sigmoid; });
  wrong.expect(
      "logits: expected null unless the router is a softmax, not renormalised, or one "
      "with a sum_floor",
      [](auto& x) { x.logits = x.scores; });
  for (bool const floored : {false, true}) {
    wrong.expect(
        "logits: expected a pointer with a softmax, not renormalised, or one with a "
        "sum_floor, got null",
        [=](auto& x) { x.router.renormalize = floored, x.router.sum_floor = floored ? 0.5 : 0; });
  }
  wrong.optional_rows("logits", &RouterGradient::logits, 8);
  wrong.rows("dlogits", &RouterGradient::dlogits, 4, 8);
  wrong.expect("rounded_to: expected float32, bfloat16 or float16, got float64",
               [](auto& x) { x.rounded_to = DType::float64; });
  wrong.expect("rounded_to: expected float32, got bfloat16",
               [](auto& x) { x.dtype = DType::float64, x.rounded_to = DType::bfloat16; });
}

TEST(Check, TokenRounding) {
  WrongCalls<TokenRounding> const wrong(&Calls::rounding, cpu::round_tokens, cuda::round_tokens);
  expect_slots(wrong);
  wrong.score_dtype("dtype", &TokenRounding::dtype);
  expect_router(wrong);
  for (int const rounding : {-1, 5}) {
    wrong.expect(text_of("rounding: expected 0 to 4, got ", rounding),
                 [=](auto& x) { x.rounding = Rounding(rounding); });
  }
  wrong.size("tile", &TokenRounding::tile, 1, 1048576);
  wrong.expect("tokens * top_k rounded to tiles: expected 0 to 2147483647, got 4299157504",
               [](auto& x) {
                 x.rounding = Rounding::up, x.tile = 1 << 20;
                 x.tokens = int64_t(1) << 22, x.experts = 4096, x.top_k = 1;
               });
  wrong.rows("logits", &TokenRounding::logits, 4, 8);
  wrong.pointer("ids", &TokenRounding::ids);
  wrong.expect("seed: expected a pointer, got null",
               [](auto& x) { x.rounding = Rounding::stochastic; });
  wrong.expect("seed: expected null unless rounding is stochastic, got a pointer",
               [](auto& x) { x.seed = &some_seed; });
  wrong.pointer("token_offsets", &TokenRounding::token_offsets);
  wrong.pointer("list_ids", &TokenRounding::list_ids);
  wrong.pointer("scores", &TokenRounding::scores);
  expect_no_slopes(wrong);
  wrong.workspace("workspace", &TokenRounding::workspace, 1280);
}

TEST(Check, BalanceSums) {
  WrongCalls<BalanceSums> const wrong(&Calls::balance, cpu::balance_sums, cuda::balance_sums);
  expect_slots(wrong);
  expect_sequences(wrong);
  wrong.score_dtype("dtype", &BalanceSums::dtype);
  expect_score(wrong, &BalanceSums::score);
  wrong.rows("logits", &BalanceSums::logits, 4, 8);
  wrong.pointer("ids", &BalanceSums::ids);
  wrong.pointer("shares", &BalanceSums::shares);
  wrong.pointer("squares", &BalanceSums::squares);
  wrong.pointer("counts", &BalanceSums::counts);
  wrong.workspace("workspace", &BalanceSums::workspace, 768);
}

TEST(Check, BalanceGradient) {
  WrongCalls<BalanceGradient> const wrong(&Calls::balance_gradient, cpu::balance_gradient,
                                          cuda::balance_gradient);
  wrong.size("tokens", &BalanceGradient::tokens, 0, kMostRows);
  wrong.size("experts", &BalanceGradient::experts, 1, 4096);
  expect_sequences(wrong);
  wrong.score_dtype("dtype", &BalanceGradient::dtype);
  expect_score(wrong, &BalanceGradient::score);
  wrong.rows("logits", &BalanceGradient::logits, 4, 8);
  wrong.pointer("dshares", &BalanceGradient::dshares);
  wrong.pointer("dsquares", &BalanceGradient::dsquares);
  wrong.rows("dlogits", &BalanceGradient::dlogits, 4, 8);
}

TEST(Check, Sort) {
  WrongCalls<Sort> const wrong(&Calls::sort, cpu::sort_by_expert, cuda::sort_by_expert);
  expect_slots(wrong);
  expect_lists(wrong);
  wrong.score_dtype("score_dtype", &Sort::score_dtype);
  wrong.pointer("ids", &Sort::ids);
  wrong.pointer("offsets", &Sort::offsets);
  wrong.pointer("row_token", &Sort::row_token);
  wrong.pointer("slot_row", &Sort::slot_row);
  wrong.pointer("row_score", &Sort::row_score);
  wrong.workspace("workspace", &Sort::workspace, 512);
}

void expect_operand(WrongCalls<GroupedGemm> const& wrong, char const* name,
                    GroupedGemm::Operand GroupedGemm::* of, int64_t elements) {
  wrong.expect(text_of(name, ": expected ", elements, " elements, got null"),
               [=](auto& x) { (x.*of).data = nullptr; });
  for (int const which : {0, 1, 2}) {
    int64_t const s[] = {which == 0 ? -1 : 128, which == 1 ? -1 : 8, which == 2 ? -1 : 1};
    wrong.expect(
        text_of(name, ": expected strides of at least 0, got (", s[0], ", ", s[1], ", ", s[2], ")"),
        [&](auto& x) { x.*of = {(x.*of).data, s[0], s[1], s[2]}; });
  }
}

// An operand of `groups` matrices whose rows lie too far apart.
void expect_near_rows(WrongCalls<GroupedGemm> const& wrong, char const* name,
                      GroupedGemm::Operand GroupedGemm::* of, int64_t groups, int64_t rows,
                      int64_t columns) {
  int64_t const stride = wrong.kFarStride;
  wrong.expect(text_of(name, wrong.far(groups, rows, columns), "(0, ", stride, ", 1)"),
               [&](auto& x) { x.*of = {(x.*of).data, 0, stride, 1}; });
}

TEST(Check, GroupedGemm) {
  using Ragged = GroupedGemm::Ragged;
  WrongCalls<GroupedGemm> const wrong(&Calls::gemm, cpu::grouped_gemm, cuda::grouped_gemm);
  for (int const ragged : {-1, 4}) {
    wrong.expect(
        text_of("ragged: expected 0 (rows), 1 (inner), 2 (columns) or 3 (none), got ", ragged),
        [=](auto& x) { x.ragged = Ragged(ragged); });
  }
  wrong.size("m", &GroupedGemm::m, 0, kMostRows);
  wrong.size("n", &GroupedGemm::n, 0, kMostRows);
  wrong.size("k", &GroupedGemm::k, 0, kMostRows);
  wrong.size("groups", &GroupedGemm::groups, 1, 4096);
  wrong.dtype("dtype", &GroupedGemm::dtype);
  wrong.expect("out_dtype: expected bfloat16 or float32, got float64",
               [](auto& x) { x.out_dtype = DType::float64; });
  wrong.pointer("offsets", &GroupedGemm::offsets);
  wrong.expect("offsets: expected null where no dimension is ragged",
               [](auto& x) { x.ragged = Ragged::none; });
  expect_operand(wrong, "a", &GroupedGemm::a, 4 * 16);
  expect_operand(wrong, "b", &GroupedGemm::b, 16 * 8);
  expect_operand(wrong, "d", &GroupedGemm::d, 4 * 8);
  expect_near_rows(wrong, "a", &GroupedGemm::a, 1, 4, 16);
  expect_near_rows(wrong, "b", &GroupedGemm::b, 2, 16, 8);
  expect_near_rows(wrong, "d", &GroupedGemm::d, 1, 4, 8);
  wrong.expect("d: expected strides of an output that does not overlap, got (0, 0, 0)",
               [](auto& x) { x.d.row_stride = x.d.col_stride = 0; });
  char const* const overlap = "d: expected strides of an output that does not overlap, got ";
  wrong.expect(text_of(overlap, "(0, 7, 1)"), [](auto& x) { x.d.row_stride = 7; });
  wrong.expect(text_of(overlap, "(0, 1, 3)"),
               [](auto& x) { x.d.row_stride = 1, x.d.col_stride = 3; });
  wrong.expect(text_of(overlap, "(31, 8, 1)"),
               [](auto& x) { x.ragged = Ragged::inner, x.d.group_stride = 31; });
  wrong.expect(text_of(overlap, "(0, 8, 1)"), [](auto& x) {
    x.ragged = Ragged::inner, x.d.group_stride = 0, x.d.group_at = x.offsets;
  });
  wrong.optional_rows("bias", &GroupedGemm::bias, 8);
  wrong.expect("bias: expected a row stride of at least its width 4, or 0 for packed rows, got 3",
               [](auto& x) { x.ragged = Ragged::columns, x.bias.stride = 3; });
}

}  // namespace

}  // namespace guild::test
