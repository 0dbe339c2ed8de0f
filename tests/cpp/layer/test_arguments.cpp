// What the public headers promise those who write calls: they compile with stricter warnings than
// Guild's own, arguments that are left out are empty, and counts follow from sizes.
#pragma GCC diagnostic error "-Wshadow"
#pragma GCC diagnostic error "-Wmissing-field-initializers"
#include "guild/guild.h"

#include <gtest/gtest.h>

#include "shared/routing.h"

namespace guild::test {

namespace {

TEST(Arguments, MayBeLeftOut) {
  ScaledUp const up{.dtype = DType::float32};
  EXPECT_EQ(up.w_scales.gate.data, nullptr);
  EXPECT_EQ(up.w_scales.up.data, nullptr);
  PeerBackward const backward{.publish = {}};
  EXPECT_EQ(backward.own_scores.scores, nullptr);
  LowRankTerm<ConstWeight> const term{.rank = 4};
  EXPECT_EQ(term.b.data, nullptr);
  ConstUpWeight const without_gate{.gate = {&up, 8, 4, 1}};
  EXPECT_EQ(without_gate.up.data, nullptr);
}

TEST(Arguments, ViewsOfRowsAndWeights) {
  float memory = 0;
  ConstRows const rows(Rows{&memory, 5});
  EXPECT_EQ(rows.data, &memory);
  EXPECT_EQ(rows.stride, 5);
  int32_t const at = 0;
  ConstWeight const weight(Weight{&memory, 6, 3, 1, &at});
  EXPECT_EQ(weight.data, &memory);
  EXPECT_EQ(weight.expert_stride, 6);
  EXPECT_EQ(weight.out_stride, 3);
  EXPECT_EQ(weight.in_stride, 1);
  EXPECT_EQ(weight.expert_at, &at);
}

// A sort fills as many rows as a layer of the same sizes has.
TEST(Arguments, SortsCountAsLayersDo) {
  for (int64_t const slots : {-1, 0, 5, 9}) {
    for (int64_t const room : {-1, 0, 4, 6, 20}) {
      Sizes const sizes{.tokens = 3, .experts = 4, .top_k = 2, .slots = slots, .room = room};
      Sort const sort{.tokens = 3, .experts = 4, .top_k = 2, .slots = slots, .room = room};
      int64_t const all = slots < 0 ? 6 : slots;
      EXPECT_EQ(sizes.slot_count(), all);
      EXPECT_EQ(slot_count(sort), all);
      EXPECT_EQ(sizes.rows(), room < 0 ? all : std::min(room, all));
      EXPECT_EQ(row_count(sort), sizes.rows());
    }
  }
}

}  // namespace

}  // namespace guild::test
