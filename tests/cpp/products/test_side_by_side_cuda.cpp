// Products of some of a layer's experts each, which write parts of one result on two streams.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "device.h"
#include "guild/cuda.h"
#include "layer.h"

namespace guild::test {

namespace {

// The up projection of the experts from `first` on.
UpProjection of_experts(UpProjection x, int64_t first, int64_t count) {
  x.sizes.experts = count;
  x.routing.offsets += first;
  for (ConstWeight* const w : {&x.w_up.gate, &x.w_up.up}) {
    w->data = static_cast<char const*>(w->data) + first * w->expert_stride * 2;
  }
  return x;
}

// Some 50 rows an expert, whose tiles are claimed from a counter.
TEST(Cuda, TwoPartsOfAProductSideBySide) {
  char const* why = nullptr;
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  LayerParam p;
  p.shape.name = "side_by_side", p.shape.routing = "random";
  p.shape.sizes = {.tokens = 3000, .hidden = 1024, .intermediate = 512, .experts = 64, .top_k = 1};
  p.act = activations().front();
  p.dtype = DType::bfloat16, p.on_cuda = true;
  Layer l(*device, p);
  Sizes const& s = l.s;
  auto const x = l.input(s.tokens, s.hidden);
  auto const up = l.input(s.experts * p.width(), s.hidden, 1, /*strided=*/false);
  Tensor a = l.output(s.rows(), s.intermediate);
  auto const w_up =
      up_weight<ConstWeight>(up.view().data, s, p.gated(), p.order(), /*transposed=*/false, 2);
  UpProjection const whole{s,  p.dtype, p.act.activation, p.order(), l.routing(), x.view(), w_up,
                           {}, {},      a.view()};
  a.poison();
  cuda::up_projection(whole);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  auto const expected = a.raw();

  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  Indices<int32_t> const counters(*device, 2);
  for (int64_t const first : {29, 32, 40}) {
    for (int round = 0; round < 20; ++round) {
      a.poison();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      cuda::up_projection(of_experts(whole, 0, first),
                          {.stream = streams[0], .counter = counters.data(), .shared = true});
      cuda::up_projection(of_experts(whole, first, s.experts - first),
                          {.stream = streams[1], .counter = counters.data() + 1, .shared = true});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_TRUE(a.raw() == expected) << first << " experts, round " << round;
    }
  }
  for (cudaStream_t const stream : streams) cudaStreamDestroy(stream);
}

}  // namespace

}  // namespace guild::test
