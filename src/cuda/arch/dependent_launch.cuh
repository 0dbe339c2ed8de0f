// Programmatic dependent launch: a short kernel gets its blocks onto the multiprocessors while the
// one before it still runs. PTX ISA, section "griddepcontrol".
#pragma once
namespace guild::cuda {

// From here on the next kernel of the stream may start if its launch is `early`
// (cuda/launch.h).
__device__ inline void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernels before have completed: their results are visible, and what they read may
// be overwritten.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace guild::cuda
