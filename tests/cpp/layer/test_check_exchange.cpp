// Wrong calls of the exchange between ranks: each throws an Error that names the argument, its
// value and what was expected, and touches no memory.
#include <limits>

#include "guild/peer_layer.h"
#include "wrong_call.h"

namespace guild::test {

namespace {

constexpr int64_t kHuge = int64_t(1) << 60;

// The errors of every call about the memory that ranks share.
template <class Args>
void expect_memory(WrongCalls<Args> const& wrong) {
  auto const memory = [](Args& x) -> PeerMemory& { return x.memory; };
  for (int64_t const ranks : {0, 33}) {
    wrong.expect(text_of("ranks: expected 1 to 32, got ", ranks),
                 [=](Args& x) { memory(x).ranks = ranks; });
  }
  for (int64_t const rank : {-1, 2}) {
    wrong.expect(text_of("rank: expected 0 to 1, got ", rank),
                 [=](Args& x) { memory(x).rank = rank; });
  }
  wrong.expect(
      "memory: expected tokens >= 0 and top_k, row_bytes and returned >= 1, got -1, 2, 32 and 2",
      [=](Args& x) { memory(x).tokens = -1; });
  // Products that wrap around to a small number.
  for (int64_t const tokens : {int64_t(1) << 31, kHuge, kHuge << 2}) {
    wrong.expect(text_of("memory: expected at most 2147483647 slots of all ranks "
                         "(ranks * tokens * top_k), got 2 * ",
                         tokens, " * 2"),
                 [=](Args& x) { memory(x).tokens = tokens; });
  }
  wrong.expect(text_of("memory: expected at most 2147483647 slots of all ranks "
                       "(ranks * tokens * top_k), got 2 * 4 * ",
                       kHuge << 1),
               [=](Args& x) { memory(x).top_k = kHuge << 1; });
  wrong.expect(text_of("memory: expected fewer than 2^60 bytes of rows "
                       "(tokens * row_bytes * returned), got 4 * ",
                       kHuge << 2, " * 2"),
               [=](Args& x) { memory(x).row_bytes = kHuge << 2; });
  wrong.expect(text_of("memory: expected fewer than 2^60 bytes of rows "
                       "(tokens * row_bytes * returned), got 4 * 32 * ",
                       kHuge),
               [=](Args& x) { memory(x).returned = kHuge; });
  wrong.expect("peers: expected a pointer, got null", [=](Args& x) { memory(x).peers = nullptr; });
}

template <class Args>
void expect_slots(WrongCalls<Args> const& wrong) {
  for (int64_t const top_k : {0, 3}) {
    wrong.expect(
        text_of("top_k: expected 1 to 2 (what the ranks' memory has room for), got ", top_k),
        [=](Args& x) { x.top_k = top_k; });
  }
}

template <class Args>
void expect_experts(WrongCalls<Args> const& wrong) {
  for (int64_t const experts : {-2, 0, 9}) {
    wrong.expect(text_of("experts: expected a positive multiple of 2 (ranks), got ", experts),
                 [=](Args& x) { x.experts = experts; });
  }
  wrong.expect("experts / ranks: expected 1 to 4096, got 4097",
               [](Args& x) { x.experts = 2 * 4097; });
}

template <class Args>
void expect_score_bytes(WrongCalls<Args> const& wrong) {
  wrong.expect("score_bytes: expected 4 or 8, got 2", [](Args& x) { x.score_bytes = 2; });
}

template <class Args>
void expect_row_bytes(WrongCalls<Args> const& wrong) {
  for (int64_t const bytes : {0, 33}) {
    wrong.expect(
        text_of("row_bytes: expected 1 to 32 (what the ranks' memory has room for), got ", bytes),
        [=](Args& x) { x.row_bytes = bytes; });
  }
}

template <class Args>
void expect_row(WrongCalls<Args> const& wrong) {
  wrong.dtype("dtype", &Args::dtype);
  wrong.size("hidden", &Args::hidden, 1, 1073741760);
  wrong.expect("row_bytes: expected 1 to 32 (what the ranks' memory has room for), got 34",
               [](Args& x) { x.hidden = 17; });
}

template <class Args>
void expect_tokens(WrongCalls<Args> const& wrong) {
  for (int64_t const tokens : {-1, 5}) {
    wrong.expect(
        text_of("tokens: expected 0 to 4 (what the ranks' memory has room for), got ", tokens),
        [=](Args& x) { x.tokens = tokens; });
  }
}

TEST(CheckExchange, Publish) {
  WrongCalls<Publish> const wrong(&Calls::publish, cpu::publish, cuda::publish);
  expect_memory(wrong);
  expect_tokens(wrong);
  expect_row_bytes(wrong);
  wrong.pointer("rows", &Publish::rows);
  for (int64_t const stride : {-32, 0, 31}) {
    wrong.expect(text_of("row_stride: expected at least row_bytes, 32, got ", stride),
                 [=](Publish& x) { x.row_stride = stride; });
  }
  expect_slots(wrong);
  expect_experts(wrong);
  expect_score_bytes(wrong);
  wrong.pointer("scores", &Publish::scores);
  wrong.pointer("token_row", &Publish::token_row);
}

TEST(CheckExchange, Meet) {
  WrongCalls<Meet> const wrong(&Calls::meet, cpu::meet, cuda::meet);
  expect_memory(wrong);
  wrong.expect("seconds: expected more than 0, got 0", [](Meet& x) { x.seconds = 0; });
  wrong.expect("seconds: expected more than 0, got nan",
               [](Meet& x) { x.seconds = std::numeric_limits<double>::quiet_NaN(); });
  for (int64_t const count : {-1, 15}) {
    wrong.expect(text_of("facts: expected 0 to 14, got ", count),
                 [=](Meet& x) { x.count = count; });
  }
  wrong.expect("report: expected host memory, got null", [](Meet& x) { x.report = nullptr; });
}

TEST(CheckExchange, Tables) {
  WrongCalls<Tables> const wrong(&Calls::tables, cpu::tables, cuda::tables);
  expect_memory(wrong);
  expect_slots(wrong);
  expect_experts(wrong);
  expect_score_bytes(wrong);
  wrong.pointer("ids", &Tables::ids);
  wrong.pointer("scores", &Tables::scores);
  wrong.pointer("tokens", &Tables::tokens);
}

TEST(CheckExchange, Pull) {
  WrongCalls<Pull> const wrong(&Calls::pull, cpu::pull, cuda::pull);
  expect_memory(wrong);
  expect_row_bytes(wrong);
  expect_slots(wrong);
  wrong.pointer("ids", &Pull::ids);
  wrong.pointer("rows", &Pull::rows);
  wrong.expect("part: expected 0 (whole), 1 (first) or 2 (rest), got 3",
               [](Pull& x) { x.part = Part(3); });
  wrong.expect("first_experts: expected 0 to 4096, got -1",
               [](Pull& x) { x.part = Part::first, x.first_experts = -1; });
}

TEST(CheckExchange, Push) {
  WrongCalls<Push> const wrong(&Calls::push, cpu::push, cuda::push);
  expect_memory(wrong);
  expect_row(wrong);
  wrong.size("rows", &Push::rows, 0, 2147483647);
  expect_slots(wrong);
  wrong.expect("by_slot: expected neither scores nor lists of variable length",
               [](Push& x) { x.by_slot = true; });
  for (bool const by_slot : {false, true}) {
    wrong.expect("returned: expected room for 2 rows per token in the ranks' memory, got 1",
                 [=](Push& x) {
                   x.memory.returned = 1, x.by_slot = by_slot;
                   if (by_slot) x.scores = nullptr;
                 });
  }
  wrong.rows("y", &Push::y, 8, 16);
  wrong.pointer("row_of", &Push::row_of);
  wrong.pointer("tokens", &Push::tokens);
  wrong.expect("part: expected 0 (whole), 1 (first) or 2 (rest), got 7",
               [](Push& x) { x.part = Part(7); });
  wrong.expect("part: expected 0 (whole) by slot, got 1",
               [](Push& x) { x.part = Part::first, x.by_slot = true, x.scores = nullptr; });
  wrong.expect("rest_from: expected a pointer, got null", [](Push& x) { x.part = Part::rest; });
}

TEST(CheckExchange, Collect) {
  WrongCalls<Collect> const wrong(&Calls::collect, cpu::collect, cuda::collect);
  expect_memory(wrong);
  expect_row(wrong);
  expect_tokens(wrong);
  wrong.expect("returned: expected room for 2 rows per token in the ranks' memory, got 1",
               [](Collect& x) { x.memory.returned = 1; });
  wrong.pointer("token_row", &Collect::token_row);
  wrong.optional_rows("residual", &Collect::residual, 16);
  wrong.pointer("o", &Collect::o);
}

TEST(CheckExchange, PushScores) {
  WrongCalls<PushScores> const wrong(&Calls::push_scores, cpu::push_scores, cuda::push_scores);
  expect_memory(wrong);
  expect_slots(wrong);
  expect_score_bytes(wrong);
  wrong.pointer("ids", &PushScores::ids);
  wrong.pointer("scores", &PushScores::scores);
}

TEST(CheckExchange, ReturnedScores) {
  for (bool const collects : {false, true}) {
    WrongCalls<ReturnedScores> const wrong(&Calls::returned_scores,
                                           collects ? cpu::collect_scores : cpu::clear_scores,
                                           collects ? cuda::collect_scores : cuda::clear_scores);
    expect_memory(wrong);
    expect_score_bytes(wrong);
    for (int64_t const slots : {-1, 9}) {
      wrong.expect(
          text_of("slots: expected 0 to 8 (what the ranks' memory has room for), got ", slots),
          [=](ReturnedScores& x) { x.slots = slots; });
    }
  }
  Calls calls;
  ReturnedScores args = calls.returned_scores();
  args.scores = nullptr;
  EXPECT_THROW(cpu::collect_scores(args), Error);
}

// The CPU backend reads the list of the ranks' memory before it touches any of them.
template <class Args>
void expect_peers(Args (Calls::*right)(), void (*run)(Args const&)) {
  auto const expect = [&](std::string const& message, int64_t rank, auto spoil) {
    SCOPED_TRACE(message);
    Calls calls;
    Args const args = (calls.*right)();
    calls.peers[rank] = spoil(calls.memory);
    try {
      run(args);
      ADD_FAILURE() << "no error";
    } catch (Error const& error) {
      EXPECT_EQ(error.what(), message);
    }
  };
  for (int64_t const rank : {0, 1}) {
    std::string const name = text_of("memory.peers[", rank, "]: expected ");
    expect(name + text_of("the memory of rank ", rank, ", got null"), rank,
           [](char*) -> void* { return nullptr; });
    expect(name + "an address that 16 divides, got one that leaves 4", rank,
           [](char* memory) -> void* { return memory + 4; });
  }
}

TEST(CheckExchange, PeersOnTheCpu) {
  expect_peers(&Calls::publish, cpu::publish);
  expect_peers(&Calls::meet, cpu::meet);
  expect_peers(&Calls::tables, cpu::tables);
  expect_peers(&Calls::pull, cpu::pull);
  expect_peers(&Calls::push, cpu::push);
  expect_peers(&Calls::collect, cpu::collect);
  expect_peers(&Calls::push_scores, cpu::push_scores);
  expect_peers(&Calls::returned_scores, cpu::clear_scores);
  expect_peers(&Calls::returned_scores, cpu::collect_scores);
  expect_peers(&Calls::peer_forward, cpu::peer_forward);
  expect_peers(&Calls::peer_backward, cpu::peer_backward);
}

// What every pass over ranks requires: steps that are valid by themselves, on one memory.
template <class Pass>
void expect_pass(WrongCalls<Pass> const& wrong) {
  wrong.expect("rows: expected a pointer, got null", [](Pass& x) { x.publish.rows = nullptr; });
  wrong.expect("seconds: expected more than 0, got 0", [](Pass& x) { x.published.seconds = 0; });
  wrong.expect("seconds: expected more than 0, got 0", [](Pass& x) { x.returned.seconds = 0; });
  wrong.expect("ids: expected a pointer, got null", [](Pass& x) { x.pull.ids = nullptr; });
  wrong.expect("memory: expected the same in all steps", [](Pass& x) { --x.pull.memory.tokens; });
  wrong.expect("memory: expected the same in all steps", [](Pass& x) { ++x.push.memory.peers; });
  wrong.expect("memory: expected the same in all steps",
               [](Pass& x) { x.returned.memory.rank = 0; });
  wrong.expect("published.published: expected true since it follows publish",
               [](Pass& x) { x.published.published = false; });
  wrong.expect("returned.published: expected false since it follows push",
               [](Pass& x) { x.returned.published = true; });
  wrong.expect("routing.offsets: expected a pointer, got null",
               [](Pass& x) { x.layer.routing.offsets = nullptr; });
  wrong.expect("pull.top_k: expected 2 (top_k of the layer), got 1",
               [](Pass& x) { x.pull.top_k = 1; });
  wrong.expect("pull.row_bytes: expected 32 (a row's), got 16",
               [](Pass& x) { x.pull.row_bytes = 16; });
  wrong.expect("pull.part: expected 0 (whole), got 1", [](Pass& x) { x.pull.part = Part::first; });
  wrong.expect("push.dtype: expected bfloat16 like the layer, got float16",
               [](Pass& x) { x.push.dtype = DType::float16; });
  wrong.expect("push.hidden: expected 16 (hidden of the layer), got 8",
               [](Pass& x) { x.push.hidden = 8; });
  wrong.expect("push.rows: expected 16 (rows of the layer), got 17",
               [](Pass& x) { x.push.rows = 17; });
  wrong.expect("push: expected one sum per token of top_k slots (no by_slot, no token_offsets)",
               [](Pass& x) { x.push.by_slot = true, x.push.scores = nullptr; });
  wrong.expect("push.row_of: expected the memory of layer.routing.slot_row",
               [](Pass& x) { ++x.push.row_of; });
  wrong.expect("publish.row_bytes: expected 32 (pull.row_bytes), got 16",
               [](Pass& x) { x.publish.row_bytes /= 2; });
  wrong.expect("collect.dtype: expected bfloat16 like the layer, got float16",
               [](Pass& x) { x.collect.dtype = DType::float16; });
  wrong.expect("collect.hidden: expected 16 (hidden of the layer), got 8",
               [](Pass& x) { x.collect.hidden = 8; });
  wrong.expect("collect.tokens: expected 3 (what is published), got 2",
               [](Pass& x) { x.collect.tokens = 2; });
}

TEST(CheckExchange, PeerForward) {
  using F = PeerForward;
  WrongCalls<F> const wrong(&Calls::peer_forward, cpu::peer_forward, cuda::peer_forward);
  expect_pass(wrong);
  wrong.expect("layer.sort: expected a pointer, got null", [](F& x) { x.layer.sort = nullptr; });
  wrong.expect("layer.x: expected the memory of pull.rows",
               [](F& x) { x.layer.x = x.publish.ids; });
  wrong.expect("layer.x: expected packed rows of 16, got stride 17",
               [](F& x) { x.layer.x.stride = 17; });
  wrong.expect("publish.ids: expected a pointer, got null", [](F& x) { x.publish.ids = nullptr; });
  wrong.expect("experts: expected 4 (all ranks'), got 6", [](F& x) { x.tables.experts = 6; });
  wrong.expect("top_k: expected 2 (top_k of the layer), got 1", [](F& x) { x.publish.top_k = 1; });
  wrong.expect("score_bytes: expected 4 (of the layer's scores), got 8",
               [](F& x) { x.tables.score_bytes = 8; });
  wrong.expect("layer.sort.ids: expected the memory of tables.ids", [](F& x) { ++x.tables.ids; });
  wrong.expect("layer.sort.scores: expected the memory of tables.scores",
               [](F& x) { x.tables.scores = x.tables.ids; });
  wrong.expect("pull.ids: expected the memory of tables.ids", [](F& x) { ++x.pull.ids; });
  wrong.expect("push.tokens: expected the memory of tables.tokens", [](F& x) { ++x.push.tokens; });
  wrong.expect("collect.token_row: expected the memory of publish.token_row",
               [](F& x) { ++x.collect.token_row; });
  wrong.expect("kept_rows: expected -1 to 16, got 17", [](F& x) { x.kept_rows = 17; });
  auto const with_room = [](F& x, int64_t capacity, int64_t after) {
    static Sort sort;
    sort = *x.layer.sort, sort.room = x.layer.sizes.room = 5;
    x.layer.sort = &sort, x.push.rows = 5;
    x.returned.needed = x.layer.routing.offsets + after, x.returned.capacity = capacity;
  };
  wrong.expect(
      "returned.needed: expected the memory of layer.routing.offsets[experts], since layer.sizes "
      "has a room",
      [&](F& x) { with_room(x, 5, 1); });
  wrong.expect("returned.capacity: expected 5 (rows of the layer), got 4",
               [&](F& x) { with_room(x, 4, 2); });
  wrong.expect("ids: expected a pointer, got null", [](F& x) {
    x.own = *x.layer.sort;
    x.own.ids = nullptr;
  });
}

TEST(CheckExchange, PeerBackward) {
  using B = PeerBackward;
  WrongCalls<B> const wrong(&Calls::peer_backward, cpu::peer_backward, cuda::peer_backward);
  expect_pass(wrong);
  wrong.expect("layer.dout: expected the memory of pull.rows",
               [](B& x) { x.layer.dout = x.pull.ids; });
  wrong.expect("layer.dx: expected null because dx_rows are pushed",
               [](B& x) { x.layer.dx = x.layer.dx_rows, x.layer.dx_rows = {}; });
  wrong.expect("layer.dh: expected null because the weight gradients are computed from it here",
               [](B& x) { x.layer.dh = x.layer.a_scaled = x.layer.dx_rows; });
  wrong.expect(
      "dtype: expected 0 (float32), 1 (bfloat16), 2 (float16) or 3 (float64), got 7",
      [](B& x) { x.again.x = x.layer.x, x.again.sizes = x.layer.sizes, x.again.dtype = DType(7); });
  auto const again = [&](char const* message, auto spoil) {
    wrong.expect(message, [=](B& x) {
      UpProjection& up = x.again;
      up.sizes = x.layer.sizes, up.dtype = x.layer.dtype, up.activation = x.layer.activation;
      up.order = x.layer.order, up.routing = x.layer.routing, up.x = x.layer.x;
      up.w_up = x.layer.w_up;
      spoil(x);
    });
  };
  again("again.sizes.intermediate: expected 8 (intermediate of the layer), got 1024",
        [](B& x) { x.again.sizes.intermediate = 1024; });
  again("again.dtype: expected bfloat16 like the layer, got float16",
        [](B& x) { x.again.dtype = DType::float16; });
  again("again: expected null h and a because they lie in the workspace",
        [](B& x) { x.again.h.data = x.layer.workspace; });
  again("again.h_rows: expected -1, got 3", [](B& x) { x.again.h_rows = 3; });
  again("kept_rows: expected 0 to 16, got 17", [](B& x) { x.kept_rows = 17; });
  again("again_offsets: expected a pointer, got null", [](B& x) { x.kept_rows = 5; });
  again("again.routing.row_token: expected the memory of layer.routing.row_token",
        [](B& x) { ++x.again.routing.row_token; });
  wrong.expect("push.part: expected 0 (whole), got 2",
               [](B& x) { x.push.part = Part::rest, x.push.rest_from = x.pull.ids; });
  wrong.expect("push.y: expected the memory of layer.dx_rows", [](B& x) { x.push.y = x.pull.ids; });
  wrong.expect("scores.scores: expected the memory of layer.dscores",
               [](B& x) { x.scores.scores = x.pull.ids; });
  wrong.expect("score_bytes: expected 4 (of the layer's scores), got 8",
               [](B& x) { x.own_scores.score_bytes = 8; });
  wrong.expect("scores: expected a pointer, got null", [](B& x) { x.own_scores.scores = nullptr; });
}

// The size functions throw too, so that nobody allocates a size that has wrapped around.
TEST(CheckExchange, SizesOfMemory) {
  Calls calls;
  PeerMemory memory = calls.shared;
  memory.peers = nullptr;
  EXPECT_GT(peer_memory_bytes(memory), returned_scores_offset(memory));
  EXPECT_GT(returned_scores_offset(memory), returned_rows_offset(memory));
  memory.tokens = kHuge << 1;
  EXPECT_THROW(peer_memory_bytes(memory), Error);
  EXPECT_THROW(returned_rows_offset(memory), Error);
  EXPECT_THROW(returned_scores_offset(memory), Error);
}

}  // namespace

}  // namespace guild::test
