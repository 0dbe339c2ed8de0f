// Data movement: TMA boxes of rank 3 and 4, cp.async of 16 bytes or one word, and words and 8x8
// matrices between registers and shared memory. PTX ISA, sections "cp.async.bulk.tensor",
// "cp.async", "stmatrix" and "ldmatrix".
#pragma once
#include <cuda.h>

#include "cuda/arch/barrier.cuh"

namespace guild::cuda {

// Prefetches the descriptor, so that the first TMA instruction need not wait for it.
__device__ inline void prefetch(CUtensorMap const& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

struct Coordinate {
  int x, y, z;  // x: the contiguous dimension
};

__device__ inline void tma_load(CUtensorMap const& map, void* to, Coordinate at, Barrier& done) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}

// Multicasts the box to every block of the cluster whose bit is set in `blocks`, to the same offset
// in shared memory. Each block's copy completes on its own `done` barrier.
__device__ inline void tma_load_multicast(CUtensorMap const& map, void* to, Coordinate at,
                                          Barrier& done, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(at.x), "r"(at.y), "r"(at.z), "h"(blocks)
      : "memory");
}

// Boxes of rows that stop at the end of a group. A clipped map (launch.cuh) has the dimensions
// (columns, r, end, wrap); its element (., r, end, kClip), with r < kClip, lies in row r + end -
// kClip of the matrix. A box that starts at r = kClip - n therefore starts n rows before `end`, and
// its rows at or past `end` are out of bounds, which TMA fills with zeros.
inline constexpr int kClip = 1 << 30;
struct ClippedCoordinate {
  int x, r, end;
};
__device__ inline void tma_load_clipped(CUtensorMap const& map, void* to, ClippedCoordinate at,
                                        Barrier& done) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(at.x), "r"(at.r), "r"(at.end), "r"(kClip)
      : "memory");
}
__device__ inline void tma_load_clipped_multicast(CUtensorMap const& map, void* to,
                                                  ClippedCoordinate at, Barrier& done,
                                                  uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(at.x), "r"(at.r), "r"(at.end), "r"(kClip),
      "h"(blocks)
      : "memory");
}

// TMA does not write elements that are out of bounds.
__device__ inline void tma_store(CUtensorMap const& map, void const* from, Coordinate at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared_address(from)), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
struct RowCoordinate {
  int x, half, r, row;  // of RowOutput's map: fragment.cuh
};
// from: an address in shared memory.
__device__ inline void tma_store_at(CUtensorMap const& map, uint32_t from, RowCoordinate at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(from), "r"(at.x), "r"(at.half), "r"(at.r), "r"(at.row)
      : "memory");
}
__device__ inline void tma_store(CUtensorMap const& map, void const* from, RowCoordinate at) {
  tma_store_at(map, shared_address(from), at);
}
// policy: the L2 eviction priority, from evict_last() or evict_normal().
__device__ inline void tma_store(CUtensorMap const& map, void const* from, RowCoordinate at,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, "
      "%5}], [%1], %6;" ::"l"(&map),
      "r"(shared_address(from)), "r"(at.x), "r"(at.half), "r"(at.r), "r"(at.row), "l"(policy)
      : "memory");
}
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;"); }

// Waits until at most `pending` of this thread's store groups still read shared memory.
template <int pending>
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Shared-memory address of 16-byte chunk `chunk` of row `row` in a box with the 128-byte swizzle.
__device__ inline uint32_t chunk_address(uint32_t box, int row, int chunk) {
  return box + row * 128 + ((chunk ^ (row % 8)) * 16);
}

// Copies 16 bytes to shared memory. Where `valid` is false, writes zeros and does not read `from`.
__device__ inline void copy_async(uint32_t to, void const* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// The same for one word, always copied.
__device__ inline void copy_word_async(uint32_t to, void const* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Predicated, without a branch: if `condition`, copies a word, or writes zeros where `valid` is
// false.
__device__ inline void copy_word_async_if(bool condition, uint32_t to, void const* from,
                                          bool valid) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %0, 0; @p cp.async.ca.shared.global [%1], [%2], 4, %3; }" ::
          "r"(unsigned(condition)),
      "r"(to), "l"(from), "r"(valid ? 4 : 0)
      : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups are in flight.
template <int pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ inline void store_shared_if(bool condition, uint32_t address, uint32_t value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.u32 [%1], %2; }" ::"r"(
                   unsigned(condition)),
               "r"(address), "r"(value)
               : "memory");
}
__device__ inline void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ inline float load_shared_float(uint32_t address) {
  return __uint_as_float(load_shared(address));
}

// 16 bytes of zeros.
__device__ inline void clear_words(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// Four 8x8 matrices of 16-bit elements. Lane l supplies the address of row l % 8 of matrix l / 8;
// register j of lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix j. The
// transposed forms swap rows and columns.
__device__ inline void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ inline void store_matrices_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                                 uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ inline void load_matrices(uint32_t from, uint32_t& a, uint32_t& b, uint32_t& c,
                                     uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t from, uint32_t& a, uint32_t& b,
                                                uint32_t& c, uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from)
               : "memory");
}

}  // namespace guild::cuda
