// Sizes of the work buffers that callers provide, and errors for wrong sizes of layers.
#include <functional>

#include "wrong_call.h"

namespace guild::test {

namespace {

TEST(Workspace, IsZeroForNothingAndGrowsWithSizes) {
  Sizes s{0, 64, 32, 4, 2};
  EXPECT_EQ(moe_forward_workspace_bytes(s, DType::bfloat16), 0);
  EXPECT_EQ(moe_backward_workspace_bytes(s, DType::bfloat16, true), 0);
  EXPECT_EQ(sort_workspace_bytes(0, 4, 2), 0);
  EXPECT_EQ(down_gradient_workspace_bytes(s, true), 0);
  EXPECT_EQ(moe_weight_gradients_workspace_bytes(s), 0);
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
  Sizes few = s;  // rows that take less memory than their sums
  few.tokens = 8;
  EXPECT_GT(moe_backward_workspace_bytes(few, DType::bfloat16, true, true, true),
            moe_backward_workspace_bytes(few, DType::bfloat16, true, true, false));
}

TEST(Workspace, WithoutWhatTheCallerKeeps) {
  Sizes const s{4096, 512, 256, 8, 2};
  auto const bytes = [&](bool keeps) {
    return moe_backward_workspace_bytes(s, DType::bfloat16, true, true, true, keeps);
  };
  EXPECT_EQ(bytes(false) - bytes(true), 4096 * 2 * (2 * 256 + 256) * 2);  // dH and A'
  EXPECT_EQ(moe_weight_gradients_workspace_bytes(s), 3 * 256);
}

using OfLayer = std::function<void(Sizes const&)>;
using OfRouter = std::function<void(int64_t tokens, int64_t experts, int64_t top_k)>;

template <class Call>
void expect_error(std::string const& message, Call call) {
  SCOPED_TRACE(message);
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (Error const& error) {
    EXPECT_EQ(error.what(), message);
  }
}

TEST(Workspace, WrongSizesOfLayersAreNamed) {
  std::vector<OfLayer> const all = {
      [](Sizes const& s) { down_gradient_workspace_bytes(s, true); },
      [](Sizes const& s) { moe_forward_workspace_bytes(s, DType::float32); },
      [](Sizes const& s) {
        moe_backward_workspace_bytes(s, DType::float32, true, true, /*biases=*/false);
      },
      [](Sizes const& s) { moe_weight_gradients_workspace_bytes(s); }};
  struct Size {
    char const* name;
    int64_t Sizes::* of;
    int64_t most;
  };
  Size const sizes[] = {{"tokens", &Sizes::tokens, 2147483647},
                        {"hidden", &Sizes::hidden, 1073741760},
                        {"intermediate", &Sizes::intermediate, 1073741760},
                        {"experts", &Sizes::experts, 4096},
                        {"top_k", &Sizes::top_k, 4096}};
  for (OfLayer const& bytes : all) {
    for (Size const& size : sizes) {
      for (int64_t const wrong : {int64_t(-1), size.most + 1}) {
        Sizes s{4, 16, 8, 2, 2};
        s.*size.of = wrong;
        expect_error(text_of(size.name, ": expected 0 to ", size.most, ", got ", wrong),
                     [&] { bytes(s); });
      }
    }
    expect_error("tokens * top_k: expected 0 to 2147483647, got 4294967296",
                 [&] { bytes({int64_t(1) << 30, 16, 8, 2, 4}); });
    for (int64_t const wrong : {int64_t(-2), int64_t(1) << 31}) {
      expect_error(text_of("slots: expected -1 to 2147483647, got ", wrong),
                   [&] { bytes({4, 16, 8, 2, 2, wrong}); });
      expect_error(text_of("room: expected -1 to 2147483647, got ", wrong),
                   [&] { bytes({4, 16, 8, 2, 2, -1, wrong}); });
    }
  }
  expect_error("intermediate: expected 0 to 1073741760, got -1",
               [] { score_parts({4, 16, -1, 2, 2}); });
  char const* const dtype =
      "dtype: expected 0 (float32), 1 (bfloat16), 2 (float16) or 3 (float64), got 4";
  expect_error(dtype, [] { moe_forward_workspace_bytes({4, 16, 8, 2, 2}, DType(4)); });
  expect_error(dtype, [] { moe_backward_workspace_bytes({4, 16, 8, 2, 2}, DType(4), true); });
}

TEST(Workspace, WrongSizesOfRoutersAreNamed) {
  auto const rounded = [](int64_t tokens, int64_t experts, int64_t top_k) {
    rounded_slots(tokens, experts, top_k, Rounding::up, 8);
  };
  auto const expect_slots = [](OfRouter const& bytes) {
    for (int64_t const wrong : {int64_t(-1), int64_t(1) << 31}) {
      expect_error(text_of("tokens: expected 0 to 2147483647, got ", wrong),
                   [&] { bytes(wrong, 8, 2); });
    }
    for (int64_t const wrong : {-1, 4097}) {
      expect_error(text_of("experts: expected 0 to 4096, got ", wrong),
                   [&] { bytes(4, wrong, 2); });
    }
  };
  for (OfRouter const& bytes : {OfRouter(sort_workspace_bytes), OfRouter(rounded)}) {
    expect_slots(bytes);
    for (int64_t const wrong : {-1, 4097}) {
      expect_error(text_of("top_k: expected 0 to 4096, got ", wrong), [&] { bytes(4, 8, wrong); });
    }
    expect_error("tokens * top_k: expected 0 to 2147483647, got 4294967296",
                 [&] { bytes(int64_t(1) << 30, 8, 4); });
  }
  expect_slots([](int64_t t, int64_t e, int64_t) { rounding_workspace_bytes(t, e); });
  expect_slots([](int64_t t, int64_t e, int64_t) { balance_workspace_bytes(t, e, 1); });
  for (int64_t const wrong : {-1, 1 << 30}) {
    expect_error(text_of("hidden: expected 0 to 1073741760, got ", wrong),
                 [&] { router_logits_workspace_bytes(4, wrong, 8, DType::float32); });
  }
  expect_error("experts: expected 0 to 4096, got -1",
               [] { router_logits_workspace_bytes(4, 16, -1, DType::float32); });
  EXPECT_EQ(router_logits_workspace_bytes(0, 16, 8, DType::float32), 0);
  EXPECT_EQ(router_logits_workspace_bytes(4, 0, 0, DType::float32), 0);
  for (int64_t const wrong : {0, 5}) {
    expect_error(text_of("sequences: expected 1 to 4, got ", wrong),
                 [&] { balance_workspace_bytes(4, 8, wrong); });
  }
  EXPECT_EQ(balance_workspace_bytes(0, 8, 5), 0);
  for (int const wrong : {-1, 5}) {
    expect_error(text_of("rounding: expected 0 to 4, got ", wrong),
                 [&] { rounded_slots(4, 8, 2, Rounding(wrong), 8); });
  }
  for (int64_t const wrong : {0, 1048577}) {
    expect_error(text_of("tile: expected 1 to 1048576, got ", wrong),
                 [&] { rounded_slots(4, 8, 2, Rounding::up, wrong); });
  }
}

}  // namespace

}  // namespace guild::test
