// Wrong calls of a layer's steps: each throws an Error that names the argument, its value and what
// was expected, and touches no memory. Those of routing are in test_check_routing.cpp.
#include <cmath>

#include "wrong_call.h"

namespace guild::test {

namespace {

auto const kGate = [](auto& x) -> auto& { return x.w_up.gate; };
auto const kUp = [](auto& x) -> auto& { return x.w_up.up; };
auto const kOffsets = [](auto& x) -> auto& { return x.routing.offsets; };
auto const kSlotRow = [](auto& x) -> auto& { return x.routing.slot_row; };

// Expects what every product of a layer requires.
template <class Args>
void expect_layer(WrongCalls<Args> const& wrong) {
  wrong.sizes();
  wrong.dtype("dtype", &Args::dtype);
  wrong.pointer("routing.offsets", kOffsets);
}

template <class Args>
void expect_lists(WrongCalls<Args> const& wrong) {
  wrong.lists([](Args& x) -> auto& { return x.sizes.slots; },
              [](Args& x) -> auto& { return x.routing.token_offsets; });
}

void without_slots(Routing& routing) { routing.row_token = routing.slot_row = nullptr; }

template <class Args>
void expect_activation(WrongCalls<Args> const& wrong) {
  for (int const kind : {-1, 5}) {
    wrong.expect(text_of("activation.kind: expected 0 to 4, got ", kind),
                 [=](Args& x) { x.activation.kind = Activation::Kind(kind); });
  }
  // Kernels compute in float32.
  char const* const range = " number in float32's normal range, got ";
  for (double const alpha : {double(INFINITY), 1e39}) {
    wrong.expect(text_of("activation.alpha: expected a finite", range, alpha),
                 [=](Args& x) { x.activation.alpha = alpha; });
  }
  for (double const limit : {0., -7., double(NAN), 1e-60}) {
    wrong.expect(text_of("activation.limit: expected a positive", range, limit),
                 [=](Args& x) { x.activation.limit = limit; });
  }
  for (double const offset : {double(NAN), -1e39}) {
    wrong.expect(text_of("activation.up_offset: expected a finite", range, offset),
                 [=](Args& x) { x.activation.up_offset = offset; });
  }
}

// Slots and rows that know each other.
template <class Args>
void expect_places(WrongCalls<Args> const& wrong) {
  wrong.expect("routing.slot_row: expected a pointer, got null", [](Args& x) {
    x.sizes.slots = 8, x.routing.token_offsets = x.routing.offsets, x.routing.slot_row = nullptr;
  });
  wrong.expect("routing.row_token: expected a pointer, got null",
               [](Args& x) { x.routing.row_token = nullptr; });
  wrong.expect("routing.row_token: expected null without slot_row, got a pointer",
               [](Args& x) { x.routing.slot_row = nullptr; });
}

// Both halves of the up projection's gradient, or neither, each in its own memory.
template <class Args>
void expect_halves(WrongCalls<Args> const& wrong) {
  wrong.expect("dw_up.gate: expected 2 matrices of 8 x 16, got null",
               [](Args& x) { x.dw_up.gate.data = nullptr; });
  wrong.expect("dw_up.up: expected other memory than dw_up.gate's, got the same",
               [](Args& x) { x.dw_up.up.data = x.dw_up.gate.data; });
}

template <class Args>
void expect_order(WrongCalls<Args> const& wrong) {
  wrong.expect("order: expected 0 (concatenated) or 1 (interleaved), got 2",
               [](Args& x) { x.order = GateUp(2); });
}

template <class Args>
void expect_up_weight(WrongCalls<Args> const& wrong) {
  wrong.weight("w_up.gate", kGate, 8, 16);
  wrong.weight("w_up.up", kUp, 8, 16);
}

// The type of gradients of weights or biases, of a layer in float32.
template <class Args, class Of>
void expect_gradient_dtype(WrongCalls<Args> const& wrong, char const* name, Of of) {
  wrong.expect(text_of(name, ": expected float32, got bfloat16"),
               [&](Args& x) { std::invoke(of, x) = DType::bfloat16; });
}

// A low-rank term; `matrix`: the name of its matrix, which has `out` rows.
template <class Args>
void expect_low_rank(WrongCalls<Args> const& wrong, char const* matrix, int64_t out) {
  wrong.expect("low_rank.rank: expected 0 to 1073741760, got -1",
               [](Args& x) { x.low_rank.rank = -1; });
  wrong.expect("low_rank.t: expected 8 rows of 4, got null", [](Args& x) { x.low_rank.rank = 4; });
  wrong.expect(text_of(matrix, ": expected 2 matrices of ", out, " x 4, got null"),
               [](Args& x) { x.low_rank.rank = 4, x.low_rank.t = x.routing.offsets; });
}

TEST(Check, UpProjection) {
  WrongCalls<UpProjection> const wrong(&Calls::up, cpu::up_projection, cuda::up_projection);
  expect_layer(wrong);
  expect_activation(wrong);
  expect_order(wrong);
  wrong.rows("x", &UpProjection::x, 4, 16);
  wrong.expect("x: expected 8 rows of 16, got null",  // by row where they are sorted
               [](auto& x) { x.x = {}, x.routing.row_token = nullptr; });
  expect_up_weight(wrong);
  wrong.optional_rows("bias", &UpProjection::bias, 16);
  wrong.optional_rows("h", &UpProjection::h, 16);
  wrong.size("h_rows", &UpProjection::h_rows, -1, 8);
  wrong.rows("a", &UpProjection::a, 8, 8);
  expect_low_rank(wrong, "low_rank.b.gate", 8);
  wrong.expect("low_rank.b.up: expected 2 matrices of 8 x 4, got null", [](auto& x) {
    x.low_rank.rank = 4, x.low_rank.t = x.routing.offsets, x.low_rank.b.gate = x.w_up.gate;
  });
}

TEST(Check, DownProjection) {
  WrongCalls<DownProjection> const wrong(&Calls::down, cpu::down_projection, cuda::down_projection);
  expect_layer(wrong);
  wrong.rows("a", &DownProjection::a, 8, 8);
  wrong.weight("w_down", &DownProjection::w_down, 16, 8);
  wrong.optional_rows("bias", &DownProjection::bias, 16);
  wrong.rows("y", &DownProjection::y, 8, 16);
  expect_low_rank(wrong, "low_rank.b", 16);
}

TEST(Check, Combine) {
  WrongCalls<Combine> const wrong(&Calls::combine, cpu::combine, cuda::combine);
  wrong.sizes();
  wrong.dtype("dtype", &Combine::dtype);
  expect_lists(wrong);
  wrong.pointer("routing.slot_row", kSlotRow);
  wrong.rows("y", &Combine::y, 8, 16);
  wrong.rows("o", &Combine::o, 4, 16);
  wrong.optional_rows("residual", &Combine::residual, 16);
  wrong.expect("residual_scale: expected null without a residual, got a pointer",
               [](auto& x) { x.residual = {}, x.residual_scale = x.y.data; });
  wrong.expect("residual_scale: expected null with a router part, got a pointer",
               [](auto& x) { x.residual = x.o, x.residual_scale = x.y.data; });
  wrong.expect("routing.slot_score: expected null with a router part, got a pointer",
               [](auto& x) { x.routing.slot_score = x.y.data; });
  wrong.optional_rows("router.dlogits", [](Combine& x) -> auto& { return x.router.dlogits; }, 2);
  wrong.pointer("router.ids", [](Combine& x) -> auto& { return x.router.ids; });
  wrong.rows("router.weight", [](Combine& x) -> auto& { return x.router.weight; }, 2, 16);
}

TEST(Check, DownGradient) {
  WrongCalls<DownGradient> const wrong(&Calls::down_gradient, cpu::down_gradient,
                                       cuda::down_gradient);
  expect_layer(wrong);
  expect_activation(wrong);
  expect_order(wrong);
  wrong.rows("dout", &DownGradient::dout, 4, 16);
  wrong.weight("w_down", &DownGradient::w_down, 16, 8);
  wrong.rows("h", &DownGradient::h, 8, 16);
  wrong.expect(
      "h_again: expected a row stride of at least its width 16, or 0 for packed rows, got 15",
      [](auto& x) { x.h_again = {x.h.data, 15}, x.needed = x.routing.offsets; });
  wrong.expect("h_rows: expected 0 to 8, got -1",
               [](auto& x) { x.h_again = x.h, x.needed = x.routing.offsets; });
  wrong.expect("h_rows: expected -1 to -1, got 4", [](auto& x) { x.h_rows = 4; });
  wrong.expect("needed: expected a pointer with h_again, got null",
               [](auto& x) { x.h_again = x.h, x.h_rows = 8; });
  wrong.expect("needed: expected null without h_again, got a pointer",
               [](auto& x) { x.needed = x.routing.offsets; });
  wrong.rows("dh", &DownGradient::dh, 8, 16);
  wrong.optional_rows("a_scaled", &DownGradient::a_scaled, 8);
  wrong.expect("db_dtype: expected float16 or float32, got bfloat16",
               [](auto& x) { x.db_dtype = DType::bfloat16; });
  wrong.optional_rows("db_up", &DownGradient::db_up, 16);
  wrong.optional_rows("db_down", &DownGradient::db_down, 16);
  expect_low_rank(wrong, "low_rank.b", 8);
  wrong.expect("db_down: expected null with a low-rank term, got a pointer",
               [](auto& x) { x.low_rank = {x.dout, x.w_down, 4}; });
  wrong.workspace("workspace", &DownGradient::workspace, 512);
  for (bool const up : {true, false}) {  // either of the two needs it
    wrong.expect("workspace: expected 512 bytes, got null",
                 [=](auto& x) { x.workspace = nullptr, (up ? x.db_up : x.db_down) = {}; });
  }
}

TEST(Check, ScoreGradient) {
  WrongCalls<ScoreGradient> const wrong(&Calls::score_gradient, cpu::score_gradient,
                                        cuda::score_gradient);
  wrong.sizes();
  wrong.dtype("dtype", &ScoreGradient::dtype);
  expect_lists(wrong);
  wrong.pointer("routing.slot_row", kSlotRow);
  wrong.pointer("score_parts", &ScoreGradient::score_parts);
  wrong.pointer("dscores", &ScoreGradient::dscores);
  wrong.pointer("routing.offsets", kOffsets);
  wrong.optional_rows("bias", &ScoreGradient::bias, 16);
  wrong.rows("dout", &ScoreGradient::dout, 4, 16);
}

TEST(Check, UpGradient) {
  WrongCalls<UpGradient> const wrong(&Calls::up_gradient, cpu::up_gradient, cuda::up_gradient);
  expect_layer(wrong);
  expect_order(wrong);
  wrong.rows("dh", &UpGradient::dh, 8, 16);
  expect_up_weight(wrong);
  wrong.rows("dx", &UpGradient::dx, 8, 16);
  expect_low_rank(wrong, "low_rank.b", 16);
}

TEST(Check, UpWeightGradient) {
  WrongCalls<UpWeightGradient> const wrong(&Calls::dw, cpu::up_weight_gradient,
                                           cuda::up_weight_gradient);
  expect_layer(wrong);
  expect_gradient_dtype(wrong, "dw_dtype", &UpWeightGradient::dw_dtype);
  expect_order(wrong);
  wrong.rows("x", &UpWeightGradient::x, 4, 16);
  wrong.rows("dh", &UpWeightGradient::dh, 8, 16);
  auto const gate = [](UpWeightGradient& x) -> auto& { return x.dw.gate; };
  auto const up = [](UpWeightGradient& x) -> auto& { return x.dw.up; };
  wrong.weight("dw.gate", gate, 8, 16);
  wrong.weight("dw.up", up, 8, 16);
  wrong.output_weight("dw.gate", gate, 8, 16);
  wrong.output_weight("dw.up", up, 8, 16);
}

TEST(Check, DownWeightGradient) {
  WrongCalls<DownWeightGradient> const wrong(&Calls::dw_down, cpu::down_weight_gradient,
                                             cuda::down_weight_gradient);
  expect_layer(wrong);
  expect_gradient_dtype(wrong, "dw_dtype", &DownWeightGradient::dw_dtype);
  wrong.rows("dout", &DownWeightGradient::dout, 4, 16);
  wrong.rows("a", &DownWeightGradient::a, 8, 8);
  wrong.weight("dw", &DownWeightGradient::dw, 16, 8);
  wrong.output_weight("dw", &DownWeightGradient::dw, 16, 8);
}

TEST(Check, BiasGradient) {
  WrongCalls<BiasGradient> const wrong(&Calls::db, cpu::bias_gradient, cuda::bias_gradient);
  wrong.size("rows", &BiasGradient::rows, 0, 2147483647);
  wrong.size("width", &BiasGradient::width, 1, 1073741760);
  wrong.size("experts", &BiasGradient::experts, 1, 4096);
  wrong.dtype("dtype", &BiasGradient::dtype);
  wrong.expect("db_dtype: expected bfloat16 or float32, got float16",
               [](auto& x) { x.db_dtype = DType::float16; });
  wrong.pointer("routing.offsets", kOffsets);
  wrong.size("tokens", &BiasGradient::tokens, 0, 2147483647);
  wrong.rows("m", &BiasGradient::m, 4, 16);  // gathered: by token
  wrong.expect("m: expected 8 rows of 16, got null",
               [](auto& x) { x.m = {}, x.routing.row_token = nullptr; });
  wrong.expect("tokens: expected -1 to 2147483647, got -2",
               [](auto& x) { x.tokens = -2, x.routing.row_token = nullptr; });
  wrong.rows("db", &BiasGradient::db, 2, 16);
}

// A sort that comes with the layer must be valid, with the layer's sizes and arrays.
void expect_sort(WrongCalls<MoeForward> const& wrong) {
  auto const expect = [&](char const* message, auto spoil) {
    wrong.expect(message, [=](MoeForward& x) {
      static Sort sort;
      sort = {.tokens = x.sizes.tokens,
              .experts = x.sizes.experts,
              .top_k = x.sizes.top_k,
              .ids = x.routing.offsets,
              .offsets = const_cast<int32_t*>(x.routing.offsets),
              .row_token = const_cast<int32_t*>(x.routing.row_token),
              .slot_row = const_cast<int32_t*>(x.routing.slot_row),
              .workspace = x.workspace};
      sort.scores = sort.row_score = const_cast<void*>(x.routing.row_score);
      spoil(sort);
      x.sort = &sort;
    });
  };
  expect("ids: expected a pointer, got null", [](Sort& s) { s.ids = nullptr; });
  expect("sort.tokens: expected 4 as in sizes, got 5", [](Sort& s) { ++s.tokens; });
  expect("sort.experts: expected 2 as in sizes, got 3", [](Sort& s) { ++s.experts; });
  expect("sort.top_k: expected 2 as in sizes, got 3", [](Sort& s) { ++s.top_k; });
  expect("sort.room: expected -1 as in sizes, got 0", [](Sort& s) { ++s.room; });
  char const* const arrays = "sort: expected routing's arrays as its outputs";
  expect(arrays, [](Sort& s) { ++s.offsets; });
  expect(arrays, [](Sort& s) { ++s.row_token; });
  expect(arrays, [](Sort& s) { ++s.slot_row; });
  expect(arrays, [](Sort& s) { s.row_score = static_cast<char*>(s.row_score) + 4; });
  expect("sort.scores: expected a pointer with routing.row_score, got null",
         [](Sort& s) { s.scores = nullptr; });
  expect("sort.score_dtype: expected float32 like the layer, got float64",
         [](Sort& s) { s.score_dtype = DType::float64; });
}

TEST(Check, MoeForward) {
  WrongCalls<MoeForward> const wrong(&Calls::forward, cpu::moe_forward, cuda::moe_forward);
  expect_layer(wrong);
  expect_lists(wrong);
  expect_activation(wrong);
  expect_order(wrong);
  wrong.rows("x", &MoeForward::x, 4, 16);
  expect_up_weight(wrong);
  wrong.weight("w_down", &MoeForward::w_down, 16, 8);
  wrong.optional_rows("b_up", &MoeForward::b_up, 16);
  wrong.optional_rows("b_down", &MoeForward::b_down, 16);
  wrong.optional_rows("h", &MoeForward::h, 16);
  wrong.rows("o", &MoeForward::o, 4, 16);
  wrong.expect("o: expected 8 rows of 16, got null",  // where rows are not combined
               [](auto& x) { x.o = {}, without_slots(x.routing); });
  wrong.expect("residual: expected null where rows are not combined, got a pointer",
               [](auto& x) { x.residual = x.x, without_slots(x.routing); });
  wrong.optional_rows("residual", &MoeForward::residual, 16);
  wrong.expect("residual_scale: expected null without a residual, got a pointer",
               [](auto& x) { x.residual = {}, x.residual_scale = x.x.data; });
  wrong.expect("routing.slot_score: expected a pointer with row_score, got null",
               [](auto& x) { x.routing.slot_score = nullptr; });
  expect_places(wrong);
  wrong.workspace("workspace", &MoeForward::workspace, 1024);
  expect_sort(wrong);
}

TEST(Check, MoeBackward) {
  WrongCalls<MoeBackward> const wrong(&Calls::backward, cpu::moe_backward, cuda::moe_backward);
  expect_layer(wrong);
  expect_lists(wrong);
  expect_gradient_dtype(wrong, "dw_dtype", &MoeBackward::dw_dtype);
  expect_activation(wrong);
  expect_order(wrong);
  wrong.rows("dout", &MoeBackward::dout, 4, 16);
  wrong.rows("x", &MoeBackward::x, 4, 16);
  wrong.rows("h", &MoeBackward::h, 8, 16);
  expect_up_weight(wrong);
  wrong.weight("w_down", &MoeBackward::w_down, 16, 8);
  wrong.optional_rows("b_down", &MoeBackward::b_down, 16);
  wrong.optional_rows("dx", &MoeBackward::dx, 16);
  wrong.optional_rows("dx_rows", &MoeBackward::dx_rows, 16);
  wrong.expect("dx_rows: expected null with dx, got a pointer", [](auto& x) { x.dx_rows = x.dx; });
  wrong.output_weight("dw_up.gate", [](MoeBackward& x) -> auto& { return x.dw_up.gate; }, 8, 16);
  wrong.weight("dw_up.up", [](MoeBackward& x) -> auto& { return x.dw_up.up; }, 8, 16);
  wrong.output_weight("dw_down", &MoeBackward::dw_down, 16, 8);
  wrong.optional_rows("db_up", &MoeBackward::db_up, 16);
  wrong.optional_rows("db_down", &MoeBackward::db_down, 16);
  wrong.expect("routing.slot_row: expected a pointer, got null",  // for dscores
               [](auto& x) { without_slots(x.routing); });
  wrong.optional_rows("dh", &MoeBackward::dh, 16);
  wrong.optional_rows("a_scaled", &MoeBackward::a_scaled, 8);
  wrong.expect("dh: expected a buffer with a_scaled, got null", [](auto& x) { x.dh = {}; });
  wrong.expect("a_scaled: expected a buffer with dh, got null", [](auto& x) { x.a_scaled = {}; });
  auto const in_workspace = [](auto& x) { x.workspace = nullptr, x.dh = x.a_scaled = {}; };
  wrong.expect("workspace: expected 2304 bytes, got null", in_workspace);
  wrong.expect("routing.row_score: expected a pointer with slot_score, got null",
               [](auto& x) { x.routing.row_score = nullptr; });
  wrong.expect("dout: expected 4 rows of 16, got null",  // of the score gradient, without rows too
               [](auto& x) { x.dout = {}, x.sizes.room = 0, x.routing.row_token = nullptr; });
  expect_places(wrong);
  wrong.workspace("workspace", &MoeBackward::workspace, 1536);
  expect_halves(wrong);
}

TEST(Check, MoeWeightGradients) {
  using Step = MoeWeightGradients;
  WrongCalls<Step> const wrong(&Calls::weight_gradients, cpu::moe_weight_gradients,
                               cuda::moe_weight_gradients);
  expect_layer(wrong);
  expect_gradient_dtype(wrong, "dw_dtype", &Step::dw_dtype);
  expect_order(wrong);
  wrong.rows("x", &Step::x, 4, 16);
  wrong.rows("dout", &Step::dout, 4, 16);
  wrong.rows("dh", &Step::dh, 8, 16);
  wrong.rows("a_scaled", &Step::a_scaled, 8, 8);
  wrong.output_weight("dw_up.gate", [](Step& x) -> auto& { return x.dw_up.gate; }, 8, 16);
  wrong.weight("dw_up.up", [](Step& x) -> auto& { return x.dw_up.up; }, 8, 16);
  wrong.output_weight("dw_down", &Step::dw_down, 16, 8);
  wrong.workspace("workspace", &Step::workspace, 768);
  expect_halves(wrong);
}

TEST(Check, CudaSaysWhyItCannotRun) {
  char const* why = "";
  if (cuda::usable(&why)) return;
  EXPECT_STRNE(why, "");
  if (cuda::built()) return;
  Calls calls;
  EXPECT_THROW(cuda::up_projection(calls.up()), Error);
}

}  // namespace

}  // namespace guild::test
