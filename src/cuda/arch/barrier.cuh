// mbarrier, the fences between generic and async proxy, named barriers and setmaxnreg.
//
// A phase completes when all its arrivals and all announced bytes (expect_tx) are in. wait(parity)
// blocks until the phase of that parity has completed; on a fresh barrier, wait(1) returns at once.
// PTX ISA, section "mbarrier".
#pragma once
#include <cstdint>

namespace guild::cuda {

__device__ inline uint32_t shared_address(void const* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// Pins a value in a register. Without it the compiler rematerialises shared-memory addresses at
// every use, from a special register that is slow to read.
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
  // Arrives on the same barrier in another block of the cluster. Orders no writes: use it only to
  // signal "this thread has finished reading". Release at cluster scope would cost a GPU-wide
  // fence.
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
  // Announces bytes without arriving. At least one arrival of this phase must still be pending.
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

// Makes this thread's mbarrier.init visible to the cluster. A barrier must follow before other
// threads use them. PTX ISA, section "fence".
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders generic-proxy accesses to shared memory before later accesses by TMA or wgmma.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier among `threads` threads; id 0 is __syncthreads().
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// setmaxnreg: producers give up registers, consumers take them. Executed by whole warpgroups.
template <int count>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

}  // namespace guild::cuda
