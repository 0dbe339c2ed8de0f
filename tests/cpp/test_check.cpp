// Wrong calls: each throws an Error that names the argument, its value and what was expected, and
// touches no memory.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>

#include "guild/guild.h"

namespace guild::test {

namespace {

// Right calls of a small layer, over memory that a wrong one must not reach.
struct Calls {
  char memory[8] = {};
  int32_t index[8] = {};
  Sizes sizes{4, 16, 8, 2, 2};
  Routing routing{index, index, index, memory, memory};
  ConstWeight weight{memory, 128, 16, 1};
  Activation activation;

  UpProjection up() {
    return {sizes,    DType::float32,   activation, GateUp::concatenated, routing,
            {memory}, {weight, weight}, {memory},   {memory, 0},          {memory, 0}};
  }
  DownProjection down() {
    return {sizes, DType::float32, routing, {memory}, {memory, 128, 8, 1}, {memory}, {memory, 0}};
  }
  UpWeightGradient dw() {
    Weight const w{memory, 128, 16, 1};
    return {sizes,   DType::float32, DType::float32, false, true, GateUp::concatenated,
            routing, {memory},       {memory},       {w, w}};
  }
  BiasGradient db() {
    return {8, 16, 2, DType::bfloat16, DType::float32, false, routing, {memory}, {memory, 0}};
  }
  Route route() { return {4, 8, 2, DType::float32, {}, {memory}, nullptr, index, memory, nullptr}; }
  RouterGradient router_gradient() {
    return {4, 8, 2, DType::float32, {}, index, memory, nullptr, memory, {}, {memory, 0}};
  }
  Sort sort() {
    return {4, 8, 2, DType::float32, false, index, memory, index, index, index, memory, memory};
  }
  GroupedGemm gemm() {
    GroupedGemm g;
    g.m = 4, g.n = 8, g.k = 16, g.groups = 2, g.offsets = index;
    g.a = {memory, 0, 16, 1}, g.b = {memory, 128, 8, 1}, g.d = {memory, 0, 8, 1};
    return g;
  }
  MoeForward forward() {
    MoeForward f;
    f.sizes = sizes, f.dtype = DType::float32, f.routing = routing, f.x = {memory};
    f.w_up = {weight, weight}, f.w_down = {memory, 128, 8, 1}, f.o = {memory, 0};
    f.workspace = memory;
    return f;
  }
  MoeBackward backward() {
    MoeBackward b;
    b.sizes = sizes, b.dtype = b.dw_dtype = DType::float32, b.routing = routing;
    b.dout = b.x = b.h = {memory};
    b.w_up = {weight, weight}, b.w_down = {memory, 128, 8, 1}, b.workspace = memory;
    return b;
  }
};

struct WrongCall {
  char const* name;
  char const* message;  // all of it
  std::function<void(Calls&)> call;
};

// A wrong call: what `make` gives, after `spoil` changed one thing in it.
template <class Args>
WrongCall wrong(char const* name, Args (Calls::*make)(), void (*run)(Args const&),
                std::type_identity_t<void (*)(Args&)> spoil, char const* message) {
  return {name, message, [=](Calls& calls) {
            Args args = (calls.*make)();
            spoil(args);
            run(args);
          }};
}

std::vector<WrongCall> wrong_projections() {
  auto const up = [](char const* name, void (*spoil)(UpProjection&), char const* message) {
    return wrong(name, &Calls::up, cpu::up_projection, spoil, message);
  };
  return {
      up(
          "tokens", [](auto& x) { x.sizes.tokens = -1; },
          "tokens: expected 0 to 2147483647, got -1"),
      up(
          "hidden", [](auto& x) { x.sizes.hidden = 0; }, "hidden: expected 1 to 1073741823, got 0"),
      up(
          "intermediate", [](auto& x) { x.sizes.intermediate = -8; },
          "intermediate: expected 1 to 1073741823, got -8"),
      up(
          "experts", [](auto& x) { x.sizes.experts = 5000; },
          "experts: expected 1 to 4096, got 5000"),
      up(
          "top_k", [](auto& x) { x.sizes.top_k = 0; }, "top_k: expected 1 to 4096, got 0"),
      up(
          "rows", [](auto& x) { x.sizes.tokens = int64_t(1) << 30, x.sizes.top_k = 4; },
          "tokens * top_k: expected 0 to 2147483647, got 4294967296"),
      up(
          "dtype", [](auto& x) { x.dtype = DType(7); },
          "dtype: expected 0 (float32), 1 (bfloat16), 2 (float16) or 3 (float64), got 7"),
      up(
          "offsets", [](auto& x) { x.routing.offsets = nullptr; },
          "routing.offsets: expected a pointer, got null"),
      up(
          "x", [](auto& x) { x.x = {}; }, "x: expected 4 rows of 16, got null"),
      up(
          "x_stride", [](auto& x) { x.x.stride = 15; },
          "x: expected a row stride of at least its width 16, or 0 for packed rows, got 15"),
      up(
          "bias_stride", [](auto& x) { x.bias.stride = 8; },
          "b_up: expected a row stride of at least its width 16, or 0 for packed rows, got 8"),
      up(
          "a", [](auto& x) { x.a = {}; }, "a: expected 8 rows of 8, got null"),
      up(
          "gate", [](auto& x) { x.w_up.gate.data = nullptr; },
          "w_up.gate: expected 2 matrices of 8 x 16, got null"),
      up(
          "up", [](auto& x) { x.w_up.up.in_stride = -1; },
          "w_up.up: expected strides of at least 0, got (128, 16, -1)"),
  };
}

std::vector<WrongCall> wrong_activations() {
  auto const up = [](char const* name, void (*spoil)(UpProjection&), char const* message) {
    return wrong(name, &Calls::up, cpu::up_projection, spoil, message);
  };
  return {
      up(
          "kind", [](auto& x) { x.activation.kind = Activation::Kind(9); },
          "activation.kind: expected 0 to 4, got 9"),
      up(
          "alpha", [](auto& x) { x.activation.alpha = INFINITY; },
          "activation.alpha: expected a finite number, got inf"),
      up(
          "limit", [](auto& x) { x.activation.limit = -7; },
          "activation.limit: expected a positive number, got -7"),
      up(
          "limit_nan", [](auto& x) { x.activation.limit = NAN; },
          "activation.limit: expected a positive number, got nan"),
      up(
          "order", [](auto& x) { x.order = GateUp(2); },
          "order: expected 0 (concatenated) or 1 (interleaved), got 2"),
  };
}

std::vector<WrongCall> wrong_gradients() {
  return {
      wrong(
          "w_down", &Calls::down, cpu::down_projection, [](auto& x) { x.w_down.data = nullptr; },
          "w_down: expected 2 matrices of 16 x 8, got null"),
      wrong(
          "dw_dtype", &Calls::dw, cpu::up_weight_gradient,
          [](auto& x) { x.dw_dtype = DType::bfloat16; },
          "dw_dtype: expected float32, got bfloat16"),
      wrong(
          "dw_overlap", &Calls::dw, cpu::up_weight_gradient,
          [](auto& x) { x.dw.gate.out_stride = 3; },
          "dw.gate: expected strides of matrices that do not overlap, 2 of 8 x 16, got (128, 3, "
          "1)"),
      wrong(
          "db_dtype", &Calls::db, cpu::bias_gradient, [](auto& x) { x.db_dtype = DType::float16; },
          "db_dtype: expected bfloat16 or float32, got float16"),
      wrong(
          "workspace", &Calls::forward, cpu::moe_forward, [](auto& x) { x.workspace = nullptr; },
          "workspace: expected 768 bytes, got null"),
      wrong(
          "residual", &Calls::forward, cpu::moe_forward,
          [](auto& x) { x.residual = x.x, x.routing.slot_row = nullptr; },
          "residual: expected null where rows are not combined, got a pointer"),
      wrong(
          "dscores", &Calls::backward, cpu::moe_backward,
          [](auto& x) {
            static float somewhere;
            x.dscores = &somewhere;
            x.routing.slot_row = nullptr;
          },
          "routing.slot_row: expected a pointer, got null"),
  };
}

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
          "slopes: expected null unless the router is a sigmoid"),
      gradient(
          "kept_logits", [](auto& x) { x.logits = x.scores; },
          "logits: expected null unless the router is a softmax, not renormalised"),
      gradient(
          "no_logits", [](auto& x) { x.router.renormalize = false; },
          "logits: expected a pointer with a softmax, not renormalised, got null"),
      gradient(
          "no_slopes", [](auto& x) { x.router.score = Score::sigmoid; },
          "slopes: expected a pointer with a sigmoid, got null"),
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

void expect_errors(std::vector<WrongCall> const& calls) {
  for (WrongCall const& c : calls) {
    SCOPED_TRACE(c.name);
    Calls fresh;
    try {
      c.call(fresh);
      ADD_FAILURE() << "no error";
    } catch (Error const& error) {
      EXPECT_STREQ(error.what(), c.message);
    }
  }
}

TEST(Check, WrongProjectionsAreNamed) { expect_errors(wrong_projections()); }

TEST(Check, WrongActivationsAreNamed) { expect_errors(wrong_activations()); }

TEST(Check, WrongGradientsAreNamed) { expect_errors(wrong_gradients()); }

TEST(Check, WrongRoutersAreNamed) { expect_errors(wrong_routers()); }

TEST(Check, WrongRoutingIsNamed) { expect_errors(wrong_routing()); }

TEST(Check, CudaSaysWhyItCannotRun) {
  char const* why = "";
  if (cuda::usable(&why)) return;
  EXPECT_STRNE(why, "");
  if (cuda::built()) return;
  Calls calls;
  EXPECT_THROW(cuda::up_projection(calls.up()), Error);
}

TEST(Workspace, IsZeroForNothingAndGrowsWithSizes) {
  Sizes s{0, 64, 32, 4, 2};
  EXPECT_EQ(moe_forward_workspace_bytes(s, DType::bfloat16), 0);
  EXPECT_EQ(moe_backward_workspace_bytes(s, DType::bfloat16, true), 0);
  EXPECT_EQ(sort_workspace_bytes(0, 4, 2), 0);
  s.tokens = int64_t(1) << 29;  // sizes whose products need 64 bits
  EXPECT_GT(moe_forward_workspace_bytes(s, DType::bfloat16), int64_t(1) << 36);
  EXPECT_GT(moe_backward_workspace_bytes(s, DType::bfloat16, true),
            moe_backward_workspace_bytes(s, DType::bfloat16, false));
}

}  // namespace

}  // namespace guild::test
