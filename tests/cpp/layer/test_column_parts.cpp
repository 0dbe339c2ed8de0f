// A down projection and combine by parts of the columns, as the GPU divides them, on the CPU.
#include "cuda/column_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "guild/cpu.h"

namespace guild::test {

namespace {

using cuda::ColumnRange;

TEST(ColumnParts, AreOfLargeLayersWithManyRows) {
  auto const parts = [](int64_t tokens, int64_t hidden, int64_t intermediate, int64_t experts) {
    Sizes const sizes{tokens, hidden, intermediate, experts, 8};
    return cuda::column_parts(sizes, DType::bfloat16, 132);
  };
  EXPECT_EQ(parts(512, 7168, 2048, 256), 4);
  EXPECT_EQ(parts(64, 7168, 2048, 256), 1);  // 7 MiB of rows
  EXPECT_EQ(parts(512, 2880, 2880, 128), 2);
  EXPECT_EQ(parts(1024, 2048, 768, 128), 1);         // 0.4 GB of weights
  EXPECT_EQ(parts(512, 6144, 32768, 8), 1);          // 96 tiles in two parts
  EXPECT_EQ(parts(512, 6144, 32768, 33), 2);         // 396
  EXPECT_EQ(parts(1 << 16, 264, 1 << 20, 1024), 2);  // no part without columns
}

TEST(ColumnParts, CoverAllColumnsOnce) {
  for (int64_t columns : {8, 256, 264, 2048, 2880, 7168}) {
    for (int64_t parts = 1; parts <= ceil_div(columns, cuda::kTileColumns); ++parts) {
      int64_t next = 0, most = 0;
      for (int64_t i = 0; i < parts; ++i) {
        ColumnRange const part = cuda::columns_of_part(columns, i, parts);
        EXPECT_EQ(part.first, next);
        EXPECT_LT(part.first, part.end);
        most = std::max(most, part.end - part.first);
        next = part.end;
      }
      EXPECT_EQ(next, columns);
      EXPECT_LE(most, cuda::most_columns_of_part(columns, parts));
    }
  }
}

// A layer of 5 tokens, 2 experts and 1,000 columns in rows that are further apart.
struct Layer {
  static constexpr int64_t kRows = 10, kHidden = 1000, kInner = 16, kApart = 1024;
  Sizes sizes{5, kHidden, kInner, 2, 2};
  std::mt19937 random{3};
  std::vector<float> a = draw(kRows * kInner), w = draw(2 * kHidden * kInner);
  std::vector<float> bias = draw(2 * kApart), residual = draw(5 * kApart), scores = draw(kRows);
  std::vector<int32_t> offsets{0, 4, kRows}, slot_row = std::vector<int32_t>(kRows);
  std::vector<float> y = std::vector<float>(kRows * kHidden), o = std::vector<float>(5 * kApart);

  Layer() { std::iota(slot_row.rbegin(), slot_row.rend(), 0); }
  std::vector<float> draw(int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = std::normal_distribution<float>()(random);
    return values;
  }

  std::vector<float> run(int64_t parts, bool transposed) {
    DownProjection down{.sizes = sizes, .dtype = DType::float32};
    down.routing.offsets = offsets.data();
    down.a = {a.data()};
    down.w_down = {w.data(), kHidden * kInner, transposed ? 1 : kInner, transposed ? kHidden : 1};
    down.bias = {bias.data(), kApart};
    down.y = {y.data()};
    Combine sum{.sizes = sizes, .dtype = DType::float32};
    sum.routing.slot_row = slot_row.data();
    sum.routing.slot_score = scores.data();
    sum.y = down.y;
    sum.o = {o.data(), kApart};
    sum.residual = {residual.data(), kApart};
    std::fill(o.begin(), o.end(), -1.f);
    for (int64_t i = 0; i < parts; ++i) {
      ColumnRange const part = cuda::columns_of_part(kHidden, i, parts);
      cpu::down_projection(cuda::of_columns(down, part));
      cpu::combine(cuda::of_columns(sum, part));
    }
    return o;
  }
};

TEST(ColumnParts, GiveTheSameOutput) {
  for (bool transposed : {false, true}) {
    Layer layer;
    std::vector<float> const whole = layer.run(1, transposed);
    for (int64_t parts : {2, 3, 4}) EXPECT_EQ(layer.run(parts, transposed), whole) << parts;
    EXPECT_EQ(std::count(whole.begin(), whole.end(), -1.f), 5 * 24);  // between the rows
  }
}

}  // namespace

}  // namespace guild::test
