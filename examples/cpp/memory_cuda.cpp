// Memory where Guild was built with CUDA.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "guild/cuda.h"
#include "memory.h"

namespace {

void must(cudaError_t status) { guild::require(status == cudaSuccess, cudaGetErrorString(status)); }

}  // namespace

bool has_gpu() {
  char const* why = "";
  if (guild::cuda::usable(&why)) return true;
  std::printf("no GPU: %s\n", why);
  return false;
}

std::shared_ptr<void> allocate(Place place, int64_t bytes) {
  void* memory = nullptr;
  if (place == Place::cpu) {
    memory = std::aligned_alloc(256, size_t(bytes + 255) / 256 * 256);
    return {memory, std::free};
  }
  must(cudaMalloc(&memory, size_t(bytes)));
  return {memory, [](void* m) { cudaFree(m); }};
}

// cudaMemcpyDefault infers the direction; the copy waits for the kernels before it.
void copy_in(Place place, void* to, void const* from, int64_t bytes) {
  if (place == Place::cpu) {
    std::memcpy(to, from, size_t(bytes));
  } else {
    must(cudaMemcpy(to, from, size_t(bytes), cudaMemcpyDefault));
  }
}

void copy_out(Place place, void* to, void const* from, int64_t bytes) {
  copy_in(place, to, from, bytes);
}
