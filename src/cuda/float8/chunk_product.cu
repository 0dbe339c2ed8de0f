// chunk_product(): tensor-core kernels, which require operands that TMA can load.
#include "checks/float8_chunks.h"
#include "cuda/float8/require.h"
#include "cuda/sm90/float8/chunk_product.h"

namespace guild::cuda {

namespace {

void require_boxes(ConstChunks const& x, char const* name) {
  require(reinterpret_cast<uintptr_t>(x.codes) % 16 == 0 && x.slot_stride % 16 == 0, name,
          ": expected 16-byte aligned codes on CUDA, got slots ", x.slot_stride,
          " apart at address ", static_cast<void const*>(x.codes));
}

}  // namespace

void chunk_product(ChunkProduct const& x, Queue queue) {
  check(x);
  int64_t const slots = chunk_slots(x.rows, x.groups);
  require_scales(x.a.scales, 1, slots, scale_blocks(x.out), "a.scales");
  require_scales(x.b.scales, 1, slots, scale_blocks(x.in), "b.scales");
  require_boxes(x.a, "a");
  require_boxes(x.b, "b");
  sm90::chunk_product(x, queue);
}

}  // namespace guild::cuda
