// The answer of a build without CUDA to a request for a CUDA device.
#include "device.h"
#include "guild/cuda.h"

namespace guild::test {

Device* cuda_device(char const** why) {
  cuda::usable(why);
  return nullptr;
}

}  // namespace guild::test
