// Prefetches scales to shared memory for the warps that multiply by them.
#pragma once
#include "cuda/arch/copy.cuh"

namespace guild::cuda {

// A warp's `count` scales per step, one lane each, copied to shared memory two steps ahead of use.
// Prefetching to registers would not help: docs/kernel.md, "A load in flight at a loop's back
// edge".
//
// Whole warps call begin() for each tile, then ready() and advance() once per step.
template <int count>
struct ScaleCopies {
  static constexpr int kSlots = 3;
  using Slots = float[kSlots][count];

  float const* from;    // what the lane copies next
  int64_t stride;       // from there to the following step's
  bool present = true;  // false: the lane copies a zero

  __device__ explicit ScaleCopies(Slots& slots) : slots(kept(shared_address(slots))) {}

  // Starts to copy the scales of a tile's first two steps, of which `steps` exist; ends two groups
  // of copies. `from`, `stride` and `present` are the tile's from here on.
  __device__ void begin(int steps, int lane) {
    copy(steps > 0, slot, lane);
    copy(steps > 1, slot == kSlots - 1 ? 0 : slot + 1, lane);
  }
  // Waits for the step's scales and returns their address.
  __device__ uint32_t ready() const {
    wait_for_copies<1>();
    __syncwarp();
    return slots + slot * kSlotBytes;
  }
  // Goes on to the next step. more: there are three or more left, this one included.
  __device__ void advance(bool more, int lane) {
    copy(more, slot == 0 ? kSlots - 1 : slot - 1, lane);
    slot = slot == kSlots - 1 ? 0 : slot + 1;
  }

 private:
  static constexpr uint32_t kSlotBytes = count * sizeof(float);

  uint32_t slots;
  int slot = 0;  // of the step to be summed

  __device__ void copy(bool wanted, int to, int lane) {
    copy_word_async_if(wanted && lane < count, slots + to * kSlotBytes + lane * sizeof(float), from,
                       present);
    commit_copies();
    from += stride;
  }
};

}  // namespace guild::cuda
