// wgmma on operands in shared memory with the 128-byte swizzle: descriptors and instructions.
//
// Tiles are 64 deep along K. K-major: rows of 64 elements, 128 bytes each. MN-major: blocks of 64
// columns, each of 64 K-rows of 128 bytes. TMA boxes with the 128-byte swizzle have both layouts.
// The instructions are CUTLASS's wrappers (BSD-3-Clause); for the layouts see PTX ISA, "wgmma".
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "cuda/arch/barrier.cuh"
#include "shared/dtype.h"

namespace guild::cuda {

using Major = cute::SM90::GMMA::Major;

inline constexpr int kRowBytes = 128;                          // of a swizzled row
inline constexpr int kBoxColumns = kRowBytes / kElementBytes;  // elements of it
inline constexpr int kBlockBytes = 64 * kRowBytes;             // 64 rows (or K-rows)

// A matrix descriptor: address and strides in units of 16 bytes, and the swizzle mode.
//   K-major    1024 bytes between groups of 8 rows
//   MN-major   1024 bytes between groups of 8 K-rows, kBlockBytes between blocks of 64 columns
// The low word holds the address, so adding to it moves the operand. The high word is the same for
// all operands.
template <Major major>
__device__ inline uint32_t descriptor(uint32_t address) {
  return (major == Major::K ? 1u : uint32_t(kBlockBytes >> 4)) << 16 | (address >> 4 & 0x3FFF);
}
__device__ inline uint64_t whole_descriptor(uint32_t low) {
  return uint64_t(uint32_t(1024 >> 4) | 1u << 30) << 32 | low;
}

// K extent of one wgmma, a slice of the tile: 16 elements of two bytes.
inline constexpr int kSliceDepth = 32 / kElementBytes;

// Bytes from one slice of a tile to the next.
template <Major major>
inline constexpr int kSliceBytes =
    major == Major::K ? kSliceDepth * kElementBytes : kSliceDepth * kRowBytes;

template <class T, int n, Major a, Major b>
struct MmaInstruction;

#define GUILD_MMA_INSTRUCTION(n)                                                               \
  template <Major a, Major b>                                                                  \
  struct MmaInstruction<__nv_bfloat16, n, a, b> {                                              \
    using type =                                                                               \
        cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<a, b, cute::SM90::GMMA::ScaleIn::One, \
                                                         cute::SM90::GMMA::ScaleIn::One>;      \
  };                                                                                           \
  template <Major a, Major b>                                                                  \
  struct MmaInstruction<__half, n, a, b> {                                                     \
    using type =                                                                               \
        cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<a, b, cute::SM90::GMMA::ScaleIn::One,   \
                                                       cute::SM90::GMMA::ScaleIn::One>;        \
  };
GUILD_MMA_INSTRUCTION(8)
GUILD_MMA_INSTRUCTION(16)
GUILD_MMA_INSTRUCTION(32)
GUILD_MMA_INSTRUCTION(64)
GUILD_MMA_INSTRUCTION(128)
GUILD_MMA_INSTRUCTION(192)
GUILD_MMA_INSTRUCTION(256)
#undef GUILD_MMA_INSTRUCTION

// acc (64 x n) = A B^T + (accumulate ? acc : 0) over one 16-deep slice; asynchronous. a, b: the low
// words of descriptors.
template <class T, int n, Major major_a, Major major_b>
__device__ inline void mma_slice(float (&acc)[n / 2], uint32_t a, uint32_t b, bool accumulate) {
  using Instruction = typename MmaInstruction<T, n, major_a, major_b>::type;
  auto const scale =
      accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  [&]<size_t... i>(std::index_sequence<i...>) {
    Instruction::fma(whole_descriptor(a), whole_descriptor(b), acc[i]..., scale);
  }(std::make_index_sequence<n / 2>{});
}

// FP8 operands, both K-major: a slice is 32 deep, a 128-byte row holds 128 elements.
enum class Codes : int { e4m3_e4m3, e5m2_e4m3 };  // of A and B

template <Codes codes>
__device__ inline void mma_codes(float (&acc)[64], uint32_t a, uint32_t b, bool accumulate) {
  using namespace cute::SM90::GMMA;
  constexpr auto one = ScaleIn::One;
  using Instruction =
      std::conditional_t<codes == Codes::e4m3_e4m3, MMA_64x128x32_F32E4M3E4M3_SS_TN<one, one>,
                         MMA_64x128x32_F32E5M2E4M3_SS_TN<one, one>>;
  auto const scale = accumulate ? ScaleOut::One : ScaleOut::Zero;
  [&]<size_t... i>(std::index_sequence<i...>) {
    Instruction::fma(whole_descriptor(a), whole_descriptor(b), acc[i]..., scale);
  }(std::make_index_sequence<64>{});
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Marks the accumulators as dead: the compiler would otherwise preserve their stale values.
template <int count>
__device__ inline void forget_registers(float (&acc)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "=f"(acc[i]));
}

// Zeroes the accumulators at this point. The compiler can neither hoist the writes nor turn them
// into copies of other registers.
template <int count>
__device__ inline void clear_registers(float (&acc)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[i]));
}

// Keeps the compiler from moving accesses to the accumulators across asynchronous wgmma.
template <int count>
__device__ inline void fence_registers(float (&acc)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

}  // namespace guild::cuda
