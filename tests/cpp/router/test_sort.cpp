// The sorting of slots by expert.
#include "device_test.h"
#include "reference.h"

namespace guild::test {

namespace {

class SortTest : public DeviceTest {
 protected:
  // room: for rows, as in Sizes
  template <class Id>
  void run(Case const& c, DType score_dtype, bool scored, int64_t room = -1) {
    Rowing expected = rowing_of(c, 11);
    int64_t const slots = c.sizes.rows(), rows = room < 0 ? slots : std::min(room, slots);
    for (int32_t& row : expected.slot_row) row = row < rows ? row : -1;
    expected.row_token.resize(rows);
    Indices<Id> const ids(device(), std::vector<Id>(expected.ids.begin(), expected.ids.end()));
    Indices<int32_t> offsets(device(), c.sizes.experts + 1), row_token(device(), rows);
    Indices<int32_t> slot_row(device(), slots);
    Tensor scores(device(), score_dtype, slots, 1), row_score(device(), score_dtype, rows, 1);
    std::vector<double> values(slots), by_row(rows);
    for (int64_t i = 0; i < slots; ++i) values[i] = float(i) / 3;
    for (double& v : values) v = round_to(score_dtype, v);
    for (int64_t i = 0; i < slots; ++i) {
      if (expected.slot_row[i] >= 0) by_row[expected.slot_row[i]] = values[i];
    }
    scores.set(values);
    Bytes workspace(device(), sort_workspace_bytes(c.sizes.tokens, c.sizes.experts, c.sizes.top_k));
    device().run(Sort{.tokens = c.sizes.tokens,
                      .experts = c.sizes.experts,
                      .top_k = c.sizes.top_k,
                      .score_dtype = score_dtype,
                      .ids_are_int64 = sizeof(Id) == 8,
                      .ids = ids.data(),
                      .scores = scored ? scores.data() : nullptr,
                      .offsets = offsets.data(),
                      .row_token = row_token.data(),
                      .slot_row = slot_row.data(),
                      .row_score = scored ? row_score.data() : nullptr,
                      .workspace = workspace.data(),
                      .room = room});
    EXPECT_EQ(offsets.get(), expected.offsets);
    EXPECT_EQ(slot_row.get(), expected.slot_row);
    EXPECT_EQ(row_token.get(), expected.row_token);
    EXPECT_TRUE(offsets.canaries_alive() && slot_row.canaries_alive() &&
                row_token.canaries_alive() && workspace.canaries_alive());
    row_score.expect_untouched_from(scored ? rows : 0, "row_score");
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

TEST_P(SortTest, Room) {
  for (char const* routing : {"random", "one", "sentinel", "none"}) {
    SCOPED_TRACE(routing);
    for (int64_t const tokens : {1, 700, 5003}) {
      Case c;
      c.sizes = {tokens, 1, 1, 67, 3};
      c.routing = routing;
      int64_t const used = rowing_of(c, 11).used();
      for (int64_t const room : {int64_t(0), used / 2, used, 3 * tokens - 1, 3 * tokens + 1}) {
        SCOPED_TRACE(room);
        run<int32_t>(c, DType::float32, true, room);
      }
    }
  }
}

GUILD_DEVICE_TESTS(SortTest);

}  // namespace

}  // namespace guild::test
