// Wrong calls of a layer's steps: each throws an Error that names the argument, its value and what
// was expected, and touches no memory. Those of routing are in test_check_routing.cpp.
#include <cmath>

#include "wrong_call.h"

namespace guild::test {

namespace {

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

std::vector<WrongCall> wrong_combines() {
  auto const combine = [](char const* name, void (*spoil)(Combine&), char const* message) {
    return wrong(name, &Calls::combine, cpu::combine, spoil, message);
  };
  return {
      combine(
          "scores", [](auto& x) { x.routing.slot_score = x.y.data; },
          "routing.slot_score: expected null with a router's part, got a pointer"),
      combine(
          "dlogits", [](auto& x) { x.router.dlogits.stride = 1; },
          "router.dlogits: expected a row stride of at least its width 2, or 0 for packed rows, "
          "got 1"),
      combine(
          "ids", [](auto& x) { x.router.ids = nullptr; },
          "router.ids: expected a pointer, got null"),
      combine(
          "weight", [](auto& x) { x.router.weight = {}; },
          "router.weight: expected 2 rows of 16, got null"),
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
          "workspace: expected 1024 bytes, got null"),
      wrong(
          "residual", &Calls::forward, cpu::moe_forward,
          [](auto& x) { x.residual = x.x, x.routing.slot_row = nullptr; },
          "residual: expected null where rows are not combined, got a pointer"),
      wrong(
          "dx_rows", &Calls::backward, cpu::moe_backward,
          [](auto& x) {
            static float somewhere;
            x.dx = x.dx_rows = {&somewhere, 0};
          },
          "dx_rows: expected null with dx, got a pointer"),
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

std::vector<WrongCall> wrong_biases() {
  auto const down = [](char const* name, void (*spoil)(DownGradient&), char const* message) {
    return wrong(name, &Calls::down_gradient, cpu::down_gradient, spoil, message);
  };
  return {
      down(
          "db_dtype", [](auto& x) { x.db_dtype = DType::bfloat16; },
          "db_dtype: expected float16 or float32, got bfloat16"),
      down(
          "db_up", [](auto& x) { x.db_up.stride = 15; },
          "db_up: expected a row stride of at least its width 16, or 0 for packed rows, got 15"),
      down(
          "db_down", [](auto& x) { x.db_down.stride = 8; },
          "db_down: expected a row stride of at least its width 16, or 0 for packed rows, got 8"),
      down(
          "workspace", [](auto& x) { x.workspace = nullptr; },
          "workspace: expected 512 bytes, got null"),
      down(
          "workspace_of_one", [](auto& x) { x.workspace = nullptr, x.db_up = {}; },
          "workspace: expected 512 bytes, got null"),
  };
}

TEST(Check, WrongProjectionsAreNamed) { expect_errors(wrong_projections()); }

TEST(Check, WrongActivationsAreNamed) { expect_errors(wrong_activations()); }

TEST(Check, WrongCombinesAreNamed) { expect_errors(wrong_combines()); }

TEST(Check, WrongGradientsAreNamed) { expect_errors(wrong_gradients()); }

TEST(Check, WrongBiasesAreNamed) { expect_errors(wrong_biases()); }

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
  EXPECT_EQ(down_gradient_workspace_bytes(s, true), 0);
  s.tokens = int64_t(1) << 29;  // sizes whose products need 64 bits
  EXPECT_GT(moe_forward_workspace_bytes(s, DType::bfloat16), int64_t(1) << 36);
  EXPECT_GT(moe_backward_workspace_bytes(s, DType::bfloat16, true),
            moe_backward_workspace_bytes(s, DType::bfloat16, false));
}

TEST(Workspace, OfBiasesSharesThatOfRows) {
  Sizes const s{4096, 512, 256, 8, 2};
  auto const bytes = [&](bool combines, bool biases) {
    return moe_backward_workspace_bytes(s, DType::bfloat16, true, combines, biases);
  };
  // Sums over 64 rows each, at most 128 + 8 of them.
  EXPECT_EQ(down_gradient_workspace_bytes(s, true), (128 + 8) * (2 * 256 + 512) * 4);
  EXPECT_EQ(down_gradient_workspace_bytes(s, false), (128 + 8) * (256 + 512) * 4);
  EXPECT_EQ(bytes(true, true), bytes(true, false));
  EXPECT_EQ(bytes(false, true) - bytes(false, false), down_gradient_workspace_bytes(s, true));
  Sizes few = s;  // fewer rows than their sums
  few.tokens = 8;
  EXPECT_GT(moe_backward_workspace_bytes(few, DType::bfloat16, true, true, true),
            moe_backward_workspace_bytes(few, DType::bfloat16, true, true, false));
}

}  // namespace

}  // namespace guild::test
