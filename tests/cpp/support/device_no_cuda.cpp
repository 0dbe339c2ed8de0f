// What a build without CUDA answers when asked for a CUDA device.
#include "device.h"
#include "guild/cuda.h"

namespace guild::test {

Device* cuda_device(char const** why) {
  cuda::usable(why);
  return nullptr;
}

}  // namespace guild::test
