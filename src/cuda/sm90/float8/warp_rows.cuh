// Per-warp stores: each warp writes its 16 rows of a box to shared memory and stores them to global
// memory, by TMA or through registers, without waiting for other warps.
#pragma once
#include "cuda/arch/copy.cuh"
#include "cuda/products.h"
#include "cuda/sm90/fragment.cuh"

namespace guild::cuda {

// A load that is issued at this point. The compiler would sink it to its use, steps later.
__device__ inline float load_now(float const* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}
__device__ inline int load_now(int32_t const* from) {
  int value;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

__device__ inline uint32_t load_shared_half(uint32_t from) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(from) : "memory");
  return half;
}
__device__ inline uint4 load_shared_16(uint32_t from) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(from)
               : "memory");
  return w;
}
__device__ inline void store_shared_16(uint32_t to, uint4 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w.x), "r"(w.y), "r"(w.z),
               "r"(w.w)
               : "memory");
}

// A matrix whose rows are whole 16-byte chunks on 16-byte boundaries. A box is 64 rows of 128
// bytes; each warp stores its 16 rows as soon as it has written them, and may reuse them after
// wait_for_stores().
struct WarpRows {
  CUtensorMap map;  // RowOutput's (fragment.cuh), of boxes of 16 rows, elements of two bytes
  bool present;

  // Called by whole warps: stores the tile's rows from element `x` of `half` on.
  __device__ void store(uint32_t box, Tile const& tile, int x, int half, int thread) const {
    int const first = thread / 32 * 16, rows = min(tile.rows - first, 16);
    fence_async_proxy();
    __syncwarp();
    if (thread % 32 != 0 || rows <= 0) return;
    tma_store_at(map, box + first * kRowBytes, {x, half, 64 - rows, tile.row + first + rows});
    tma_store_commit();
  }
};

// Waits until the warp's stores have read their boxes.
__device__ inline void wait_for_stores(int thread) {
  if (thread % 32 == 0) tma_store_wait<0>();
  __syncwarp();
}

// A matrix as above that is stored through registers, 16 bytes a lane.
struct ByteRows {
  char* data;
  int64_t stride;  // bytes

  // Stores the warp's 16 rows of a box from byte `col` on, up to byte `end`, of the tile's rows.
  // Called by whole warps, each when it has written its rows; it may write them again afterwards.
  __device__ void store(uint32_t box, Tile const& tile, int col, int end, int thread) const {
    __syncwarp();
    store_chunks(box, tile, col, end, thread, [](uint4 w) { return w; });
    __syncwarp();
  }

  // The same for codes in the order of a quad's CodeWords (quantized_fragment.cuh): of 16 columns,
  // each thread's two of the first 8, then its two of the others. Without the warp's barriers
  // before and after.
  __device__ void store_codes(uint32_t box, Tile const& tile, int col, int end, int thread) const {
    store_chunks(box, tile, col, end, thread, [](uint4 w) {
      return uint4{__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410),
                   __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632)};
    });
  }

 private:
  // arranged(w): 16 bytes as they are stored. All are loaded before the first is stored.
  template <class F>
  __device__ void store_chunks(uint32_t box, Tile const& tile, int col, int end, int thread,
                               F&& arranged) const {
    int const first = thread / 32 * 16 + thread % 32 / 8, chunk = thread % 8;
    if (col + 16 * chunk >= end) return;
    uint4 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = load_shared_16(chunk_address(box, first + 4 * i, chunk));
    char* const to = data + (tile.row + first) * stride + col + 16 * chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + 4 * i < tile.rows)
        *reinterpret_cast<uint4*>(to + 4 * i * stride) = arranged(w[i]);
    }
  }
};

// 32 columns of gate and up as 64 alternating ones: a thread's two of each are 8 bytes.
template <class T>
__device__ inline void alternating_to_box(uint32_t box, float const* gate, float const* up,
                                          int thread) {
  int const column = 2 * fragment_column(thread);
  uint32_t const start = chunk_address(box, fragment_row(thread), column / 8) + column % 8 * 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int const block = i / 2, below = i % 2;
    float const *const g = gate + 4 * block + 2 * below, *const u = up + 4 * block + 2 * below;
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"((start ^ (block * 32)) + below * 1024),
                 "r"(pack<T>(g[0], u[0])), "r"(pack<T>(g[1], u[1]))
                 : "memory");
  }
}

// Gate and up columns, in halves or alternating, or `columns` columns without a gate.
template <class T>
struct GateUpRows {
  WarpRows halves;
  ByteRows pairs;
  int columns;  // of one of them

  __device__ bool present() const { return halves.present || pairs.data != nullptr; }

  // Stores the tile's 128 columns from `col` on, 64 values a thread, of gate (half 0) or up; not
  // for alternating columns.
  __device__ void put_half(int half, float const* value, uint32_t const (&boxes)[2],
                           Tile const& tile, int col, int thread) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (col + 64 * part >= columns) break;
      fragment_to_box<T>(boxes[part], value + 32 * part, thread);
      halves.store(boxes[part], tile, col + 64 * part, half, thread);
    }
  }

  // The same with 64 columns of gate and up, 32 values a thread of each, alternating.
  __device__ void put_alternating(float const* gate, float const* up, uint32_t const (&boxes)[2],
                                  Tile const& tile, int col, int thread) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t const box = boxes[i];
      alternating_to_box<T>(box, gate + 16 * i, up + 16 * i, thread);
      pairs.store(box, tile, kBytes * (2 * col + 64 * i), 2 * kBytes * columns, thread);
    }
  }

 private:
  static constexpr int kBytes = sizeof(T);
};

}  // namespace guild::cuda
