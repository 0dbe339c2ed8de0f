// A whole layer, router to router gradient, and the router with token rounding, captured once in a
// CUDA graph and replayed with other logits: the same bits as when they are launched step by step.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <random>

#include "device.h"
#include "guild/cuda.h"
#include "layer.h"

namespace guild::test {

namespace {

// Everything a training step of one layer reads and writes.
struct LayerStep {
  Device& device;
  Layer layer;
  Sizes s = layer.s;
  DType dtype = layer.p.dtype;
  Tensor logits{device, DType::float32, s.tokens, s.experts};
  Tensor scores{device, DType::float32, s.tokens, s.top_k};
  Tensor row_score{device, DType::float32, s.rows(), 1};
  Tensor dscores{device, DType::float32, s.tokens, s.top_k};
  Tensor dlogits{device, DType::float32, s.tokens, s.experts};
  Indices<int32_t> ids{device, s.rows()}, offsets{device, s.experts + 1};
  Indices<int32_t> row_token{device, s.rows()}, slot_row{device, s.rows()};
  Tensor h{device, dtype, s.rows(), layer.p.width()}, o{device, dtype, s.tokens, s.hidden};
  Tensor dx{device, dtype, s.tokens, s.hidden};
  Tensor dw_down{device, DType::float32, s.experts * s.hidden, s.intermediate};
  Tensor db_up{device, DType::float32, s.experts, layer.p.width()};
  UpWeights w_up{device, layer.p, dtype}, dw_up{device, layer.p, DType::float32};
  Layer::Input x = layer.input(s.tokens, s.hidden), dout = layer.input(s.tokens, s.hidden);
  Layer::Input w_down = layer.input(s.experts * s.hidden, s.intermediate, 0.1);
  Layer::Input b_up = layer.input(s.experts, layer.p.width());
  Layer::Input b_down = layer.input(s.experts, s.hidden);
  Bytes sort_workspace{device, sort_workspace_bytes(s.tokens, s.experts, s.top_k)};
  Bytes forward_workspace{device, moe_forward_workspace_bytes(s, dtype)};
  Bytes backward_workspace{device, moe_backward_workspace_bytes(s, dtype, true)};

  LayerStep(Device& device, LayerParam const& p) : device(device), layer(device, p) {
    Matrix const halves[2] = {layer.random(s.experts * s.intermediate, s.hidden, 0.1, dtype),
                              layer.random(s.experts * s.intermediate, s.hidden, 0.1, dtype)};
    w_up.set(halves);
  }

  Routing routing() const {
    return {offsets.data(), row_token.data(), slot_row.data(), row_score.data(), scores.data()};
  }

  Matrix other_logits[2] = {layer.random(s.tokens, s.experts, 2, DType::float32),
                            layer.random(s.tokens, s.experts, 2, DType::float32)};

  void set(int which) { logits.set(other_logits[which].values); }
  void enqueue(cuda::Queue queue) const;
  std::vector<std::vector<std::byte>> results() const {
    return {scores.raw(), h.raw(),       o.raw(),     dx.raw(),
            dw_up.raw(),  dw_down.raw(), db_up.raw(), dlogits.raw()};
  }
  void poison() {
    for (Tensor* t : {&scores, &row_score, &dscores, &dlogits, &h, &o, &dx, &dw_down, &db_up}) {
      t->poison();
    }
    dw_up.poison();
  }
};

void LayerStep::enqueue(cuda::Queue queue) const {
  Router const router;
  cuda::route({s.tokens, s.experts, s.top_k, DType::float32, router, logits.view(), nullptr,
               ids.data(), scores.data()},
              queue);
  cuda::sort_by_expert(
      {s.tokens, s.experts, s.top_k, DType::float32, false, ids.data(), scores.data(),
       offsets.data(), row_token.data(), slot_row.data(), row_score.data(), sort_workspace.data()},
      queue);
  MoeForward f;
  f.sizes = s, f.dtype = dtype, f.activation = layer.p.act.activation, f.order = layer.p.order();
  f.routing = routing(), f.x = x.view(), f.w_up = {w_up.view().gate, w_up.view().up};
  f.w_down = {w_down.view().data, s.hidden * s.intermediate, s.intermediate, 1};
  f.b_up = b_up.view(), f.b_down = b_down.view(), f.h = h.view(), f.o = o.view();
  f.workspace = forward_workspace.data();
  cuda::moe_forward(f, queue);
  MoeBackward b;
  b.sizes = s, b.dtype = dtype, b.dw_dtype = DType::float32, b.activation = f.activation;
  b.order = f.order, b.routing = f.routing, b.dout = dout.view(), b.x = f.x, b.h = h.view();
  b.w_up = f.w_up, b.w_down = f.w_down, b.b_down = f.b_down, b.dx = dx.view();
  b.dw_up = dw_up.view(), b.db_up = db_up.view(), b.dscores = dscores.data();
  b.dw_down = {dw_down.data(), s.hidden * s.intermediate, s.intermediate, 1};
  b.workspace = backward_workspace.data();
  cuda::moe_backward(b, queue);
  cuda::router_gradient({s.tokens,
                         s.experts,
                         s.top_k,
                         DType::float32,
                         router,
                         ids.data(),
                         scores.data(),
                         nullptr,
                         dscores.data(),
                         {},
                         dlogits.view()},
                        queue);
}

LayerParam graph_case() {
  LayerParam p;
  p.shape.name = "graph", p.shape.routing = "random", p.shape.sizes = {300, 128, 136, 8, 2};
  p.act = activations().front();
  p.dtype = DType::bfloat16, p.on_cuda = true;
  return p;
}

// The router and token rounding: counts, what is asked of each expert and lists follow the logits.
struct RoundingStep {
  static constexpr int64_t tokens = 3000, experts = 40, top_k = 2, tile = 64;
  Device& device;
  int64_t slots = rounded_slots(tokens, experts, top_k, Rounding::stochastic, tile);
  Tensor logits{device, DType::float32, tokens, experts};
  Tensor chosen_scores{device, DType::float32, tokens, top_k};
  Tensor scores{device, DType::float32, slots, 1};
  Indices<int32_t> ids{device, tokens * top_k}, offsets{device, tokens + 1};
  Indices<int32_t> list_ids{device, slots};
  Indices<int64_t> seed{device, 1};
  Bytes workspace{device, rounding_workspace_bytes(tokens, experts)};

  void set(int which) {
    std::mt19937_64 random(which);
    std::normal_distribution<double> normal(0, 2);
    std::vector<double> values(tokens * experts);
    for (double& v : values) v = float(normal(random));
    logits.set(values);
    seed.set({which});
  }
  void enqueue(cuda::Queue queue) const {
    cuda::route({tokens, experts, top_k, DType::float32, Router{}, logits.view(), nullptr,
                 ids.data(), chosen_scores.data()},
                queue);
    cuda::round_tokens({tokens, experts, top_k, DType::float32, Router{}, Rounding::stochastic,
                        tile, logits.view(), ids.data(), seed.data(), offsets.data(),
                        list_ids.data(), scores.data(), nullptr, workspace.data()},
                       queue);
  }
  std::vector<std::vector<std::byte>> results() const {
    return {offsets.raw(), list_ids.raw(), scores.raw()};
  }
  void poison() {
    scores.poison();
    offsets.set(std::vector<int32_t>(tokens + 1, 77));
    list_ids.set(std::vector<int32_t>(slots, 77));
  }
};

// Captured once and replayed with the inputs of set(0) and set(1): the results of launches step by
// step.
template <class Step>
void expect_replays(Step& step) {
  std::vector<std::vector<std::byte>> expected[2];
  for (int i = 0; i < 2; ++i) {
    step.poison();
    step.set(i);
    step.enqueue({});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    expected[i] = step.results();
  }
  EXPECT_TRUE(expected[0] != expected[1]);

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t launchable;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  step.enqueue({stream});
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&launchable, graph, 0), cudaSuccess);
  for (int i : {0, 1, 0}) {
    step.poison();
    step.set(i);
    ASSERT_EQ(cudaGraphLaunch(launchable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(step.results() == expected[i]) << "replay with inputs " << i;
  }
  cudaGraphExecDestroy(launchable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(Graph, ReplaysWithOtherRouting) {
  char const* why = "";
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  LayerStep step(*device, graph_case());
  expect_replays(step);
}

TEST(Graph, RoundingReplaysWithOtherLogits) {
  char const* why = "";
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  RoundingStep step{*device};
  expect_replays(step);
}

TEST(Queue, FewerMultiprocessorsGiveTheSameBits) {
  char const* why = "";
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  LayerStep step(*device, graph_case());
  step.logits.set(step.layer.random(300, 8, 2, DType::float32).values);
  std::vector<std::vector<std::byte>> expected;
  for (bool shared : {false, true}) {
    for (int sms : {0, 1, 7}) {
      step.poison();
      step.enqueue({.sms = sms, .shared = shared});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      if (expected.empty()) expected = step.results();
      EXPECT_TRUE(step.results() == expected) << sms << " multiprocessors, shared: " << shared;
    }
  }
}

}  // namespace

}  // namespace guild::test
