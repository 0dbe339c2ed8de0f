// Programmatic dependent launch: the next kernel's blocks become resident while this one still
// runs. PTX ISA, section "griddepcontrol".
#pragma once
namespace guild::cuda {

// Lets the next kernel on the stream start, if it was launched `early` (cuda/launch.h), once every
// block of this one has called this or exited.
__device__ inline void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the preceding kernels have completed: their writes are visible, and memory that they
// read may be overwritten.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace guild::cuda
