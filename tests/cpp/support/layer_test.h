// The fixture of tests that run once for every layer case.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "layer.h"

namespace guild::test {

class LayerTest : public testing::TestWithParam<LayerParam> {
 protected:
  void SetUp() override;
  void TearDown() override;

  // Runs the step twice, on CUDA with the kernels for few tokens and with every GEMM config as
  // well, each time into poisoned outputs, and expects the same bits. `fresh` is called before each
  // run instead of poisoning where an output is added to.
  void run_twice(AnyStep const& step, std::vector<Tensor*> const& outputs,
                 std::function<void()> fresh = {});

  // The first `used` rows of an output by row, whose others must be untouched.
  std::vector<double> used_rows(Tensor const& t, char const* name) const;

  Layer& layer() { return *layer_; }

 private:
  struct Way {
    int config = -1, decode = -1;  // forced_config.h
  };
  std::vector<Way> ways() const;
  static void take(Way const& way);

  std::optional<Layer> layer_;
};

// Instantiates a fixture with the quick cases as Quick, the others as Full, those that force a GEMM
// config as Configs; `matrix` where what it tests depends on activation and layout.
#define GUILD_LAYER_TESTS(Fixture, matrix)                                                \
  INSTANTIATE_TEST_SUITE_P(Quick, Fixture, testing::ValuesIn(layer_params(true, matrix)), \
                           [](auto const& info) { return info.param.name(); });           \
  INSTANTIATE_TEST_SUITE_P(Full, Fixture, testing::ValuesIn(layer_params(false, matrix)), \
                           [](auto const& info) { return info.param.name(); });           \
  INSTANTIATE_TEST_SUITE_P(Configs, Fixture, testing::ValuesIn(config_params()),          \
                           [](auto const& info) { return info.param.name(); })

}  // namespace guild::test
