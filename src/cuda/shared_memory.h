// How much shared memory a kernel may ask for at its launch.
#pragma once
#include <atomic>

#include "cuda/device.h"

namespace guild::cuda {

// The devices on which a kernel's limit has been raised, one bit each: the call takes 2 us on the
// host.
using AllowedOn = std::atomic<uint64_t>;

// Lets blocks of a kernel have `bytes` of dynamic shared memory on the current device. allowed: the
// kernel's own variable, of static duration. `bytes` must be the same in every call.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes, AllowedOn& allowed, char const* what) {
  int device = 0;
  cuda_check(cudaGetDevice(&device), "current CUDA device");
  uint64_t const bit = uint64_t(1) << (device & 63);
  if (device < 64 && allowed.load(std::memory_order_relaxed) & bit) return;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             what);
  if (device < 64) allowed.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace guild::cuda
