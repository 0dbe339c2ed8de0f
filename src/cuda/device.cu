// The current device: its attributes, queried once, and whether the kernels were built for it.
#include "cuda/device.h"

#include <mutex>
#include <string>

namespace guild::cuda {

namespace {

// Whether the kernels were built for this compute capability (CMakeLists.txt).
bool supports(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor) == GUILD_COMPUTE_CAPABILITY;
}

struct Device {
  int multiprocessors = 0, l2_bytes = 0, major = 0, minor = 0;
};

int attribute(cudaDeviceAttr which, int index, char const* name) {
  int value = 0;
  cuda_check(cudaDeviceGetAttribute(&value, which, index), name);
  return value;
}

// Attributes of the current device, queried once per device.
Device const& current_device() {
  constexpr int kMost = 64;
  static Device known[kMost];
  static std::once_flag asked[kMost];
  int index = 0;
  cuda_check(cudaGetDevice(&index), "current CUDA device");
  require(index < kMost, "device index ", index, " is not below ", kMost);
  std::call_once(asked[index], [index] {
    known[index] = {attribute(cudaDevAttrMultiProcessorCount, index, "multiprocessor count"),
                    attribute(cudaDevAttrL2CacheSize, index, "size of L2"),
                    attribute(cudaDevAttrComputeCapabilityMajor, index, "compute capability"),
                    attribute(cudaDevAttrComputeCapabilityMinor, index, "compute capability")};
  });
  return known[index];
}

}  // namespace

bool built() { return true; }

bool usable(char const** why) {
  int devices = 0;
  char const* reason = nullptr;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    cudaGetLastError();
    reason = "no CUDA device or driver";
  } else {
    try {
      Device const& d = current_device();
      if (!supports(d.major, d.minor)) {
        reason = "the current device is not of compute capability " GUILD_COMPUTE_CAPABILITY;
      }
    } catch (Error const&) {
      reason = "the current CUDA device could not be queried";
    }
  }
  if (why != nullptr) *why = reason == nullptr ? "" : reason;
  return reason == nullptr;
}

int multiprocessors(Queue const& queue) {
  int const all = current_device().multiprocessors;
  return queue.sms > 0 && queue.sms < all ? queue.sms : all;
}

int64_t l2_bytes() { return current_device().l2_bytes; }

int32_t* cleared_counter(Queue const& queue) {
  Counters one{queue.counter, 1};
  Counters& all = queue.counters == nullptr ? one : *queue.counters;
  if (all.first == nullptr) return nullptr;
  if (all.left == 0) {
    size_t const bytes = size_t(all.count) * sizeof(*all.first);
    cuda_check(cudaMemsetAsync(all.first, 0, bytes, queue.stream), "clearing counters");
    all.left = all.count;
  }
  return all.first + --all.left;
}

}  // namespace guild::cuda
