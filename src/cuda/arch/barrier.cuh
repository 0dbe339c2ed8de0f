// Shared-memory barriers (mbarrier) and the fences between the generic and the async proxy.
//
// A barrier completes a phase when its arrivals and its announced bytes are in. wait(parity) blocks
// until the phase of that parity has completed: waiting for parity 1 on a fresh barrier returns at
// once. PTX ISA, section "mbarrier".
#pragma once
#include <cstdint>

namespace guild::cuda {

__device__ inline uint32_t shared_address(void const* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// Keeps a value in a register: prevents the compiler from rematerialising it at every use, which
// for a shared-memory address reads a slow special register.
__device__ inline uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

struct Barrier {
  uint64_t word;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)),
                 "r"(arrivals));
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word))
                 : "memory");
  }
  // Arrives on the same barrier of another block of the cluster. Only for "this thread has read":
  // it orders no writes, since release at cluster scope would cost a GPU-wide fence.
  __device__ void arrive_at(int block) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(shared_address(&word)),
        "r"(block)
        : "memory");
  }
  // Arrives once and announces bytes that TMA will deliver in this phase.
  __device__ void arrive_expect(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)),
        "r"(bytes)
        : "memory");
  }
  // Announces bytes without arriving. Some arrival of this phase must still be due.
  __device__ void expect(uint32_t bytes) {
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)),
        "r"(bytes)
        : "memory");
  }
  // Arrives when every cp.async that this thread has issued so far has landed.
  __device__ void arrive_when_copied() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&word))
                 : "memory");
  }
  __device__ void wait(uint32_t parity) { wait_at(shared_address(&word), parity); }

  // The same, given the barrier's shared-memory address.
  static __device__ void wait_at(uint32_t address, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(address),
        "r"(parity)
        : "memory");
  }
};

// Makes barrier initialisation visible to the async proxy.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders ordinary shared-memory accesses before later TMA or wgmma accesses.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier among `threads` threads; id 0 is __syncthreads().
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Sets a thread's registers to fewer (producers) or more (consumers). Called by whole warpgroups.
template <int count>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

}  // namespace guild::cuda
