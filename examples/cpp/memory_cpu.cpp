// Memory where Guild was built without CUDA.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "guild/cuda.h"
#include "memory.h"

bool has_gpu() {
  char const* why = "";
  if (guild::cuda::usable(&why)) return true;
  std::printf("no GPU: %s\n", why);
  return false;
}

std::shared_ptr<void> allocate(Place, int64_t bytes) {
  return {std::aligned_alloc(256, size_t(bytes + 255) / 256 * 256), std::free};
}

void copy_in(Place, void* to, void const* from, int64_t bytes) {
  std::memcpy(to, from, size_t(bytes));
}

void copy_out(Place, void* to, void const* from, int64_t bytes) {
  std::memcpy(to, from, size_t(bytes));
}
