// The fixture of tests that run once a backend with cases of their own.
#pragma once
#include <gtest/gtest.h>

#include "device.h"

namespace guild::test {

class DeviceTest : public testing::TestWithParam<bool> {  // whether on CUDA
 protected:
  bool on_cuda() const { return GetParam(); }
  Device& device() const {
    char const* why = "";
    return on_cuda() ? *cuda_device(&why) : cpu_device();
  }
  // The layer types of the backend.
  std::vector<DType> dtypes() const {
    if (on_cuda()) return {DType::bfloat16, DType::float16};
    return {DType::float32, DType::bfloat16, DType::float16, DType::float64};
  }
};

// The backends that can run here; CUDA's absence is reported by the test Cuda.Device.
inline std::vector<bool> backends() {
  char const* why = "";
  return cuda_device(&why) == nullptr ? std::vector<bool>{false} : std::vector<bool>{false, true};
}

// Small, so all of them are quick.
#define GUILD_DEVICE_TESTS(Fixture)                                       \
  INSTANTIATE_TEST_SUITE_P(Quick, Fixture, testing::ValuesIn(backends()), \
                           [](auto const& info) { return info.param ? "cuda" : "cpu"; })

}  // namespace guild::test
