// The sorting of slots by expert.
#include "device_test.h"
#include "reference.h"

namespace guild::test {

namespace {

class SortTest : public DeviceTest {
 protected:
  template <class Id>
  void run(Case const& c, DType score_dtype, bool scored) {
    Rowing const expected = rowing_of(c, 11);
    int64_t const slots = c.sizes.rows();
    Indices<Id> const ids(device(), std::vector<Id>(expected.ids.begin(), expected.ids.end()));
    Indices<int32_t> offsets(device(), c.sizes.experts + 1), row_token(device(), slots);
    Indices<int32_t> slot_row(device(), slots);
    Tensor scores(device(), score_dtype, slots, 1), row_score(device(), score_dtype, slots, 1);
    std::vector<double> values(slots), by_row(slots);
    for (int64_t i = 0; i < slots; ++i) values[i] = float(i) / 3;
    for (double& v : values) v = round_to(score_dtype, v);
    for (int64_t i = 0; i < slots; ++i) {
      if (expected.slot_row[i] >= 0) by_row[expected.slot_row[i]] = values[i];
    }
    scores.set(values);
    Bytes workspace(device(), sort_workspace_bytes(c.sizes.tokens, c.sizes.experts, c.sizes.top_k));
    device().run(Sort{c.sizes.tokens, c.sizes.experts, c.sizes.top_k, score_dtype, sizeof(Id) == 8,
                      ids.data(), scored ? scores.data() : nullptr, offsets.data(),
                      row_token.data(), slot_row.data(), scored ? row_score.data() : nullptr,
                      workspace.data()});
    EXPECT_EQ(offsets.get(), expected.offsets);
    EXPECT_EQ(slot_row.get(), expected.slot_row);
    EXPECT_EQ(row_token.get(), expected.row_token);
    EXPECT_TRUE(offsets.canaries_alive() && slot_row.canaries_alive() &&
                row_token.canaries_alive() && workspace.canaries_alive());
    row_score.expect_untouched_from(scored ? slots : 0, "row_score");
    if (scored) {
      EXPECT_EQ(row_score.get(), by_row);
    }
  }
};

TEST_P(SortTest, EveryRouting) {
  for (Case const& c : cases()) {
    SCOPED_TRACE(c.name);
    run<int32_t>(c, DType::float32, true);
    if (!on_cuda()) run<int64_t>(c, DType::float64, true);
    run<int64_t>(c, DType::float32, false);
  }
}

TEST_P(SortTest, ManyChunks) {  // of the CUDA backend's sort
  for (char const* routing : {"random", "one", "sentinel", "none"}) {
    SCOPED_TRACE(routing);
    Case c;
    c.sizes = {5003, 1, 1, 67, 3};
    c.routing = routing;
    run<int32_t>(c, DType::float32, true);
    run<int64_t>(c, DType::float32, true);
    c.sizes = {30011, 1, 1, 1000, 5};  // chunks longer than a block's threads
    run<int32_t>(c, DType::float32, true);
    c.sizes = {65003, 1, 1, 130, 5};  // several blocks a chunk
    run<int32_t>(c, DType::float32, true);
  }
}

GUILD_DEVICE_TESTS(SortTest);

}  // namespace

}  // namespace guild::test
