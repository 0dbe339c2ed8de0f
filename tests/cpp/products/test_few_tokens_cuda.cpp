// Which kernels serve few tokens: the steps of a layer must agree, for what one leaves to the
// products (a sort, shared experts) only those for few tokens do. Needs no GPU.
#include <gtest/gtest.h>

#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/products.h"

namespace guild::test {
namespace {

struct Choices {
  bool up, down, layer, sort;
};

Choices choices(Sizes const& s) {
  int32_t offsets[1];  // not read
  Groups const groups{offsets, int(s.experts), int(s.rows()), /*has_start=*/true};
  cuda::UpProduct up;
  up.rows = s.rows(), up.tokens = s.tokens, up.n = s.intermediate, up.k = s.hidden;
  up.groups = groups;
  cuda::RowProduct down;
  down.rows = s.rows(), down.tokens = s.tokens, down.n = s.hidden, down.k = s.intermediate;
  down.groups = groups;
  Sort const sort{.tokens = s.tokens, .experts = s.experts, .top_k = s.top_k};
  return {cuda::sm90::serves_few_tokens(up), cuda::sm90::serves_few_tokens(down),
          cuda::sm90::are_for_few_tokens(s), cuda::sm90::products_sort(sort)};
}

TEST(FewTokens, StepsAgree) {
  for (int64_t const experts : {1, 2, 8, 60, 512}) {
    for (int64_t const top_k : {1, 2, 10}) {
      if (top_k > experts) continue;
      for (auto const& [hidden, intermediate] : {std::pair{512, 64}, {4096, 14336}}) {
        for (int64_t tokens = 1; tokens < 4096; tokens += 1 + tokens / 16) {
          Sizes const sizes{.tokens = tokens,
                            .hidden = hidden,
                            .intermediate = intermediate,
                            .experts = experts,
                            .top_k = top_k};
          Choices const found = choices(sizes);
          auto const where = [&] {
            return testing::Message() << tokens << " tokens, " << top_k << " of " << experts
                                      << " experts, " << hidden << " x " << intermediate;
          };
          EXPECT_EQ(found.up, found.down) << where();
          EXPECT_EQ(found.up, found.layer) << where();
          EXPECT_TRUE(found.up || !found.sort) << where();
        }
      }
    }
  }
}

TEST(FewTokens, AreFewPerExpertAndMoreOfSmallOnes) {
  auto const few = [](int64_t tokens, int64_t intermediate) {
    return choices({.tokens = tokens,
                    .hidden = 4096,
                    .intermediate = intermediate,
                    .experts = 8,
                    .top_k = 2})
        .layer;
  };
  EXPECT_TRUE(few(112, 14336));  // 28 rows an expert
  EXPECT_FALSE(few(113, 14336));
  EXPECT_TRUE(few(160, 1024));  // 40
  EXPECT_FALSE(few(161, 1024));
}

}  // namespace
}  // namespace guild::test
