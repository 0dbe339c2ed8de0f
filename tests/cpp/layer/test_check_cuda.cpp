// What CUDA requires of arguments beyond what both backends do: 16-bit types, sizes and rows in
// multiples of 16 bytes, 1024 experts. All of it is checked before any launch, so no GPU is needed.
#include "cuda/shared_expert.h"
#include "wrong_on_cuda.h"

namespace guild::test {

namespace {

// Calls whose memory is aligned, wherever they lie.
struct AlignedCalls : Calls {
  static void align(ConstRows& rows) {
    if (rows.data != nullptr) rows.data = aligned_memory;
  }
  static void align(Rows& rows) {
    if (rows.data != nullptr) rows.data = aligned_memory;
  }
  static void align(ConstWeight& w) { w.data = aligned_memory; }
};

template <class Args, class... Parts>
Args narrowed(Args args, Parts... parts) {
  (AlignedCalls::align(std::invoke(parts, args)), ...);
  args.dtype = DType::bfloat16;
  return args;
}

auto const kGate = [](auto& x) -> auto& { return x.w_up.gate; };
auto const kUp = [](auto& x) -> auto& { return x.w_up.up; };

template <class Args>
void expect_layer(WrongOnCuda<Args> const& wrong, Args const& wide) {
  wrong.narrow(wide);
  wrong.hidden();
  wrong.intermediate();
  wrong.expect("rows: expected at most 2147475456 on CUDA, got 2147483647",
               [](Args& x) { x.sizes.slots = (int64_t(1) << 31) - 1; });
}

template <class Args>
void expect_up_weight(WrongOnCuda<Args> const& wrong) {
  wrong.weight("w_up", kGate);
  wrong.weight("w_up", kUp);
  wrong.expect(
      "w_up: expected alternating gate and up rows for interleaved pre-activations on CUDA",
      [](Args& x) { x.order = GateUp::interleaved; });
  wrong.expect(
      "w_up: expected alternating gate and up rows for interleaved pre-activations on CUDA",
      [](Args& x) {  // which those of the first expert are
        auto& [gate, up] = x.w_up;
        x.order = GateUp::interleaved;
        gate.out_stride = up.out_stride = 32, gate.expert_stride = 256;
        up.data = static_cast<char const*>(gate.data) + 16 * 2, up.expert_stride = 128;
      });
  wrong.expect(
      "w_up: expected gate and up with the same contiguous dimension on CUDA, got strides (16, 1) "
      "and (1, 8)",
      [](Args& x) { x.w_up.up.out_stride = 1, x.w_up.up.in_stride = 8; });
}

TEST(CheckOnCuda, Projections) {
  Calls calls;
  WrongOnCuda<UpProjection> const up(
      narrowed(calls.up(), kGate, kUp, &UpProjection::x, &UpProjection::bias, &UpProjection::h,
               &UpProjection::a),
      cuda::up_projection);
  expect_layer(up, calls.up());
  expect_up_weight(up);
  up.expect("x: expected fewer than 2^35 elements on CUDA, got 4 rows 68719476736 apart",
            [](UpProjection& x) { x.x.stride = int64_t(1) << 36; });
  up.rows("x", &UpProjection::x);
  up.rows("b_up", &UpProjection::bias);
  up.rows("h", &UpProjection::h);
  up.rows("a", &UpProjection::a);
  WrongOnCuda<DownProjection> const down(
      narrowed(calls.down(), &DownProjection::a, &DownProjection::w_down, &DownProjection::bias,
               &DownProjection::y),
      cuda::down_projection);
  expect_layer(down, calls.down());
  down.weight("w_down", &DownProjection::w_down);
  down.rows("a", &DownProjection::a);
  down.rows("b_down", &DownProjection::bias);
  down.rows("y", &DownProjection::y);
  down.expect("low_rank.rank: expected a multiple of 8 on CUDA, got 4",
              [](DownProjection& x) { x.low_rank = {x.a, x.w_down, 4}; });
  down.expect(
      "low_rank.b: expected the contiguous dimension that the weight has on CUDA, strides (128, 8, "
      "1), got (128, 1, 16)",
      [](DownProjection& x) { x.low_rank = {x.a, {x.w_down.data, 128, 1, 16}, 8}; });
}

TEST(CheckOnCuda, Combine) {
  Calls calls;
  auto const weight = [](Combine& x) -> auto& { return x.router.weight; };
  Combine right = narrowed(calls.combine(), &Combine::y, &Combine::o, weight);
  right.residual = {aligned_memory};
  WrongOnCuda<Combine> const wrong(right, cuda::combine);
  wrong.narrow(calls.combine());
  wrong.hidden();
  wrong.rows("y", &Combine::y);
  wrong.rows("o", &Combine::o);
  wrong.rows("residual", &Combine::residual);
  wrong.rows("router.weight", weight);
  wrong.expect("slots: expected at most 2147475456 on CUDA, got 2147483647",
               [](Combine& x) { x.sizes.tokens = (int64_t(1) << 31) - 1, x.sizes.top_k = 1; });
}

TEST(CheckOnCuda, Gradients) {
  Calls calls;
  DownGradient wide = calls.down_gradient();
  wide.dtype = DType::float32;
  DownGradient right = narrowed(calls.down_gradient(), &DownGradient::dout, &DownGradient::w_down,
                                &DownGradient::h, &DownGradient::dh);
  right.a_scaled = {aligned_memory};
  WrongOnCuda<DownGradient> const down(right, cuda::down_gradient);
  expect_layer(down, wide);
  down.weight("w_down", &DownGradient::w_down);
  down.rows("dout", &DownGradient::dout);
  down.rows("h", &DownGradient::h);
  down.rows("dh", &DownGradient::dh);
  down.rows("a_scaled", &DownGradient::a_scaled);
  WrongOnCuda<UpGradient> const up(
      narrowed(calls.up_gradient(), kGate, kUp, &UpGradient::dh, &UpGradient::dx),
      cuda::up_gradient);
  expect_layer(up, calls.up_gradient());
  expect_up_weight(up);
  up.rows("dh", &UpGradient::dh);
  up.rows("dx", &UpGradient::dx);
  WrongOnCuda<ScoreGradient> const score(
      narrowed(calls.score_gradient(), &ScoreGradient::dout, &ScoreGradient::bias),
      cuda::score_gradient);
  score.narrow(calls.score_gradient());
  score.hidden();
  score.rows("dout", &ScoreGradient::dout);
  score.rows("b_down", &ScoreGradient::bias);
}

TEST(CheckOnCuda, WeightGradients) {
  Calls calls;
  WrongOnCuda<UpWeightGradient> const up(
      narrowed(calls.dw(), &UpWeightGradient::x, &UpWeightGradient::dh), cuda::up_weight_gradient);
  expect_layer(up, calls.dw());
  up.rows("x", &UpWeightGradient::x);
  up.rows("dh", &UpWeightGradient::dh);
  up.expect("rows: expected at most 1073741824 on CUDA, got 1073741825",
            [](UpWeightGradient& x) { x.sizes.slots = (int64_t(1) << 30) + 1; });
  WrongOnCuda<DownWeightGradient> const down(
      narrowed(calls.dw_down(), &DownWeightGradient::dout, &DownWeightGradient::a),
      cuda::down_weight_gradient);
  expect_layer(down, calls.dw_down());
  down.rows("dout", &DownWeightGradient::dout);
  down.rows("a", &DownWeightGradient::a);
  BiasGradient wide = calls.db();
  wide.dtype = wide.db_dtype = DType::float32;
  WrongOnCuda<BiasGradient> const bias(calls.db(), cuda::bias_gradient);
  bias.narrow(wide);
  bias.expect("rows: expected at most 2147475456 on CUDA, got 2147483647",
              [](BiasGradient& x) { x.rows = (int64_t(1) << 31) - 1; });
  GroupedGemm wide_product = calls.gemm();
  wide_product.dtype = wide_product.out_dtype = DType::float32;
  WrongOnCuda<GroupedGemm> const product(calls.gemm(), cuda::grouped_gemm);
  product.narrow(wide_product);
  product.expect("groups * m: expected at most 2147475456 on CUDA, got 4294967296",
                 [](GroupedGemm& x) {
                   x.ragged = GroupedGemm::Ragged::none, x.offsets = nullptr;
                   x.m = int64_t(1) << 20, x.groups = 4096;
                   x.a.group_stride = x.d.group_stride = x.m * x.a.row_stride;
                 });
}

TEST(CheckOnCuda, Routing) {
  Calls calls;
  std::string const floats = "logits: expected float32 on CUDA";
  std::string const few = "experts: expected at most 1024 on CUDA, got 1025";
  auto const to_double = [](auto& x) { x.dtype = DType::float64; };
  auto const too_many = [](auto& x) { x.experts = 1025; };
  WrongOnCuda<Route> const route(calls.route(), cuda::route);
  route.expect(floats, to_double);
  route.expect(few, too_many);
  route.expect("router.groups: expected groups of at most 32 experts on CUDA, got 60",
               [](auto& x) { x.experts = 1020, x.router.groups = 17; });
  WrongOnCuda<RouterGradient> const gradient(calls.router_gradient(), cuda::router_gradient);
  gradient.expect("dtype: expected float32 on CUDA", to_double);
  gradient.expect(few, too_many);
  WrongOnCuda<TokenRounding> const rounding(calls.rounding(), cuda::round_tokens);
  rounding.expect(floats, to_double);
  rounding.expect(few, too_many);
  WrongOnCuda<BalanceSums> const sums(calls.balance(), cuda::balance_sums);
  sums.expect(floats, to_double);
  sums.expect(few, too_many);
  WrongOnCuda<BalanceGradient> const shares(calls.balance_gradient(), cuda::balance_gradient);
  shares.expect(floats, to_double);
  shares.expect(few, too_many);
  WrongOnCuda<Sort> const sort(calls.sort(), cuda::sort_by_expert);
  sort.expect("score_dtype: expected float32 on CUDA",
              [](auto& x) { x.score_dtype = DType::float64; });
  sort.expect(few, too_many);
  auto const many_tokens = [](auto& x) { x.tokens = (int64_t(1) << 31) - 1, x.top_k = 1; };
  char const* const many = "slots: expected at most 2147475456 on CUDA, got 2147483647";
  sort.expect(many, many_tokens);
  gradient.expect(many, many_tokens);
  rounding.expect("tokens: expected at most 2147475456 on CUDA, got 2147483647", [=](auto& x) {
    many_tokens(x);
    x.tile = 1;
  });
}

constexpr char const* kWideScores = "score_bytes: expected 4 on CUDA, got 8";

template <class Args>
void expect_countable(WrongOnCuda<Args> const& wrong) {
  wrong.expect(
      "memory: expected at most 2147418112 tokens of all ranks on CUDA, got 2 * 1073741823",
      [](Args& x) {
        x.memory.tokens = (int64_t(1) << 30) - 1;
        x.memory.top_k = x.top_k = 1;
      });
}

TEST(CheckOnCuda, Exchange) {
  Calls calls;
  auto const wide_scores = [](auto& x) { x.score_bytes = 8; };
  WrongOnCuda<Publish> const publish(calls.publish(), cuda::publish);
  publish.pointer("rows", &Publish::rows);
  publish.expect("row_bytes: expected a multiple of 16 on CUDA, got 24",
                 [](Publish& x) { x.row_bytes = 24; });
  publish.expect("row_stride: expected a multiple of 16 on CUDA, got 40",
                 [](Publish& x) { x.row_stride = 40; });
  publish.expect(kWideScores, wide_scores);
  WrongOnCuda<Tables>(calls.tables(), cuda::tables).expect(kWideScores, wide_scores);
  WrongOnCuda<Pull> const pull(calls.pull(), cuda::pull);
  pull.pointer("rows", &Pull::rows);
  pull.expect("row_bytes: expected a multiple of 16 on CUDA, got 24",
              [](Pull& x) { x.row_bytes = 24; });
  expect_countable(pull);
  WrongOnCuda<Push> const push(calls.push(), cuda::push);
  push.expect("hidden: expected a multiple of 8 on CUDA, got 12", [](Push& x) { x.hidden = 12; });
  push.rows("y", &Push::y);
  expect_countable(push);
  WrongOnCuda<Collect> const collect(calls.collect(), cuda::collect);
  collect.expect("hidden: expected a multiple of 8 on CUDA, got 12",
                 [](Collect& x) { x.hidden = 12; });
  collect.rows("residual", &Collect::residual);
  collect.pointer("o", &Collect::o);
  WrongOnCuda<PushScores>(calls.push_scores(), cuda::push_scores).expect(kWideScores, wide_scores);
  for (auto const run : {cuda::clear_scores, cuda::collect_scores}) {
    WrongOnCuda<ReturnedScores>(calls.returned_scores(), run).expect(kWideScores, wide_scores);
  }
}

// What both passes over ranks require of the layer.
template <class Pass>
void expect_layer_over_ranks(WrongOnCuda<Pass> const& wrong) {
  wrong.expect("intermediate: expected a multiple of 8 on CUDA, got 4",
               [](Pass& x) { x.layer.sizes.intermediate = 4; });
  wrong.weight("w_up", [](Pass& x) -> auto& { return x.layer.w_up.gate; });
  wrong.weight("w_up", [](Pass& x) -> auto& { return x.layer.w_up.up; });
  wrong.weight("w_down", [](Pass& x) -> auto& { return x.layer.w_down; });
  wrong.rows("b_down", [](Pass& x) -> auto& { return x.layer.b_down; });
  wrong.rows("h", [](Pass& x) -> auto& { return x.layer.h; });
  wrong.pointer("rows", [](Pass& x) -> auto& { return x.publish.rows; });
  wrong.expect("row_stride: expected a multiple of 16 on CUDA, got 40",
               [](Pass& x) { x.publish.row_stride = 40; });
  wrong.rows("residual", [](Pass& x) -> auto& { return x.collect.residual; });
  wrong.pointer("o", [](Pass& x) -> auto& { return x.collect.o; });
}

// Whatever a later step of forward requires is checked before the first one writes, the choice of
// experts included.
TEST(CheckOnCuda, MoeForward) {
  Calls calls;
  MoeForward right = calls.forward();
  right.dtype = DType::bfloat16;
  right.residual = {calls.memory};
  auto const expect_all = [&](void (*run)(MoeForward const&, cuda::Queue)) {
    WrongOnCuda<MoeForward> const wrong(right, run);
    wrong.hidden();
    wrong.rows("x", &MoeForward::x);
    wrong.weight("w_down", &MoeForward::w_down);
    wrong.rows("residual", &MoeForward::residual);
    wrong.rows("o", &MoeForward::o);
  };
  expect_all(cuda::moe_forward);
  expect_all([](MoeForward const& x, cuda::Queue queue) {
    cuda::moe_forward(x, cuda::LayerRouter{}, nullptr, queue);
  });
}

// Whatever a later step of backward requires is checked before the first one writes. Here the first
// launch would fail, or read the host's memory.
TEST(CheckOnCuda, MoeBackward) {
  Calls calls;
  MoeBackward right = calls.backward();
  right.dtype = right.dw_dtype = DType::bfloat16;
  WrongOnCuda<MoeBackward> const wrong(right, cuda::moe_backward);
  wrong.hidden();
  wrong.rows("dout", &MoeBackward::dout);
  wrong.rows("h", &MoeBackward::h);
  wrong.rows("b_down", &MoeBackward::b_down);
  wrong.rows("x", &MoeBackward::x);
  wrong.rows("dx", &MoeBackward::dx);
  wrong.weight("w_down", &MoeBackward::w_down);
}

TEST(CheckOnCuda, MoeWeightGradients) {
  Calls calls;
  MoeWeightGradients right = calls.weight_gradients();
  right.dtype = right.dw_dtype = DType::bfloat16;
  WrongOnCuda<MoeWeightGradients> const wrong(right, cuda::moe_weight_gradients);
  wrong.rows("dout", &MoeWeightGradients::dout);
  wrong.rows("x", &MoeWeightGradients::x);
  wrong.rows("dh", &MoeWeightGradients::dh);
}

// Whatever a later step requires is checked before the first one publishes: the other ranks would
// wait for a rank that stops halfway. Here the first launch would fail, or read the host's memory.
TEST(CheckOnCuda, LayersOverRanks) {
  Calls calls;
  PeerForward right = calls.peer_forward();
  right.layer.b_up = right.layer.b_down = {aligned_memory};
  right.layer.h = {aligned_memory, 0};
  WrongOnCuda<PeerForward> const forward(right, cuda::peer_forward);
  expect_layer_over_ranks(forward);
  forward.rows("b_up", [](PeerForward& x) -> auto& { return x.layer.b_up; });
  forward.expect("experts: expected at most 1024 on CUDA, got 1025", [](PeerForward& x) {
    x.own = *x.layer.sort;
    x.own.experts = 1025;
  });
  WrongOnCuda<PeerBackward> const backward(calls.peer_backward(), cuda::peer_backward);
  expect_layer_over_ranks(backward);
  backward.rows("x", [](PeerBackward& x) -> auto& { return x.layer.x; });
}

TEST(CheckOnCuda, CopyIndices) {
  int32_t memory[1] = {};
  auto const expect_error = [](int32_t const* from, int64_t count, int32_t* to, char const* text) {
    try {
      cuda::copy_indices(from, count, to, {});
      ADD_FAILURE() << "no error";
    } catch (Error const& error) {
      EXPECT_STREQ(error.what(), text);
    }
  };
  expect_error(memory, -1, memory, "count: expected 0 or more, got -1");
  expect_error(nullptr, 1, memory, "from: expected a pointer, got null");
  expect_error(memory, 1, nullptr, "to: expected a pointer, got null");
  EXPECT_NO_THROW(cuda::copy_indices(nullptr, 0, nullptr, {}));
}

}  // namespace

}  // namespace guild::test
