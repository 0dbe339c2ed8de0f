// What every test over layer cases does: pick the device, run twice, check what was written.
#include "layer_test.h"

#include "cuda/sm90/forced_config.h"
#include "shared/gemm_config.h"

namespace guild::test {

void LayerTest::SetUp() {
  char const* why = "";
  take(ways()[0]);
  layer_.emplace(GetParam().on_cuda ? *cuda_device(&why) : cpu_device(), GetParam());
}

void LayerTest::TearDown() { take({}); }

void LayerTest::take(Way const& way) {
  cuda::forced_config = way.config;
  cuda::forced_decode = way.decode;
}

std::vector<LayerTest::Way> LayerTest::ways() const {
  LayerParam const& p = GetParam();
  if (!p.on_cuda) return {{}, {}};
  if (p.config >= 0) return {{p.config, 0}, {p.config, 0}};
  std::vector<Way> all{{}, {}, {-1, 1}, {-1, 2}};
  for (int config = 0; config < int(std::size(kConfigs)); ++config) all.push_back({config, 0});
  return all;
}

void LayerTest::run_twice(AnyStep const& step, std::vector<Tensor*> const& outputs,
                          std::function<void()> fresh) {
  std::vector<std::vector<std::byte>> first;
  for (int run = 0; Way const& way : ways()) {
    take(way);
    if (fresh) {
      fresh();
    } else {
      for (Tensor* t : outputs) t->poison();
    }
    layer_->device.run(step);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (run == 0) {
        first.push_back(outputs[i]->raw());
      } else {
        EXPECT_TRUE(first[i] == outputs[i]->raw()) << "output " << i << " differs in a second run";
      }
    }
    ++run;
  }
  take(ways()[0]);
}

std::vector<double> LayerTest::used_rows(Tensor const& t, char const* name) const {
  t.expect_untouched_from(layer_->used(), name);
  auto values = t.get();
  values.resize(layer_->used() * t.cols());
  return values;
}

TEST(Cuda, Device) {  // without one no test of the CUDA backend exists: say so
  char const* why = "";
  if (cuda_device(&why) == nullptr) GTEST_SKIP() << "no test runs on CUDA: " << why;
}

}  // namespace guild::test
