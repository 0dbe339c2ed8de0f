// Offsets of the experts whose pre-activations are computed again: all of them or none.
#include "compose_peer.h"
#include "cuda/device.h"
#include "cuda/exchange/copies.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) only_beyond_kernel(OffsetsBeyond x) {
  int const e = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (e <= x.experts) x.to[e] = x.from[x.experts] > x.rows ? x.from[e] : 0;
}

}  // namespace

void only_beyond(OffsetsBeyond const& x, Queue const& queue) {
  unsigned const blocks = unsigned(ceil_div(x.experts + 1, kThreads));
  only_beyond_kernel<<<blocks, kThreads, 0, queue.stream>>>(x);
  cuda_check(cudaGetLastError(), "launch of offsets");
}

}  // namespace guild::cuda
