// Column sums over the 64 rows of a box by wgmma: the transposed box times a right operand of 8
// rows x 64, the narrowest that wgmma takes.
//
//   ones       all rows are ones: the plain sums, eight times
//   scores     rows 0 to 2: the fp32 scores, each split into three 16-bit terms; other rows: zeros
//
// A thread gets column c = fragment_row(thread) of the box in sum[0] and sum[1], and column c + 8
// in sum[2] and sum[3], for rows thread % 4 * 2 and the next of the right operand.
#pragma once
#include "cuda/sm90/fragment.cuh"

namespace guild::cuda {

template <class T>
struct alignas(1024) NarrowOperand {
  T row[8][64];

  // Element k of row n, in the 128-byte swizzle.
  __device__ T& at(int n, int k) { return row[n][(k / 8 ^ n) * 8 + k % 8]; }
  __device__ void fill(T value, int thread) {
#pragma unroll 1
    for (int i = thread; i < 8 * 64; i += 128) row[i / 64][i % 64] = value;
  }
};

// Starts the products of one box, asynchronously: `sum` is valid after wgmma_wait().
template <class T>
__device__ inline void start_sums(float (&sum)[4], uint32_t box, NarrowOperand<T> const& right) {
  uint32_t const a = descriptor<Major::MN>(box);
  uint32_t const b = descriptor<Major::K>(shared_address(&right));
  forget_registers(sum);
  wgmma_fence();
#pragma unroll
  for (int slice = 0; slice < 4; ++slice) {
    mma_slice<T, 8, Major::MN, Major::K>(sum, a + slice * (kSliceBytes<Major::MN> / 16),
                                         b + slice * (kSliceBytes<Major::K> / 16), slice > 0);
  }
  wgmma_commit();
}

// Stores a thread's two sums of a chunk. to: its first column; left: columns from there on.
__device__ inline void store_sums(float* to, int left, float first, float second) {
  if (0 < left) to[0] = first;
  if (8 < left) to[8] = second;
}

// Scores as a right operand, with all 24 bits of their mantissas. A power of two scales them so
// that the largest is near the top of float16's range. Call with all 128 threads.
template <class T>
struct ScoreOperand {
  NarrowOperand<T> operand;
  float back;  // the inverse of the scale

  __device__ void clear(int thread) { operand.fill(T(0.f), thread); }

  // score: by row of D; null: all 1. Products with the scores before must be complete.
  __device__ void put(float const* score, Tile const& tile, int thread) {
    auto const score_of = [&](int r) {
      return r >= tile.rows ? 0.f : score == nullptr ? 1.f : score[tile.row + r];
    };
    int const k = thread % 64;
    float const mine = score_of(k), other = score_of(k ^ 32);  // a warp has all 64
    uint32_t const most =
        __reduce_max_sync(~0u, __float_as_uint(fmaxf(fabsf(mine), fabsf(other)))) >> 23;
    uint32_t const power = min(max(268 - int(most), 1), 253);  // biased: 2^14 to 2^15 at most
    float const scaled = mine * __uint_as_float(power << 23);
    T const first = T(scaled);
    float const rest = scaled - float(first);
    T const second = T(rest);
    if (thread < 64) {
      operand.at(0, k) = first;
    } else {
      operand.at(1, k) = second;
      operand.at(2, k) = T(rest - float(second));
    }
    if (thread == 0) back = __uint_as_float((254 - power) << 23);
    fence_async_proxy();
    warpgroup_barrier();
  }
};

// Side sums: sums over each step's A, computed beside its products. All threads of a consumer call:
//
//   start(a)      before the step's products are issued; issues a wgmma group of its own. a: the
//                 shared-memory address of the consumer's 64 rows of A
//   finish(step)  after the step's products are issued; waits for its own group, not for theirs
//
// Most products have none.
struct NoSideSums {
  __device__ void start(uint32_t) {}
  __device__ void finish(int) {}
};

// Score-weighted sums of A's columns, 64 of them per step.
template <class T>
struct ScoreSums {
  ScoreOperand<T> const& scores;
  float* to;    // of the chunk, from the thread's first column on; (columns)
  int columns;  // from there on
  int rest;     // rows of A from here on are not the tile's and may hold anything; 64: none
  int thread;
  float sum[4];

  __device__ void start(uint32_t a) {
    if (rest < 64) {
      // The scores of these rows are 0, but 0 times NaN is NaN.
#pragma unroll 1
      for (int i = thread; i < (64 - rest) * 8; i += 128) clear_words(a + rest * 128 + i * 16);
      fence_async_proxy();
      warpgroup_barrier();
    }
    start_sums(sum, a, scores.operand);
  }

  __device__ void finish(int step) {
    wgmma_wait<1>();
    fence_registers(sum);
    float const back = scores.back;
    float const first = from_three_rows(sum[0] + sum[1]), second = from_three_rows(sum[2] + sum[3]);
    if (thread % 4 == 0) {
      store_sums(to + 64 * step, columns - 64 * step, first * back, second * back);
    }
  }

 private:
  // two: the sum of rows 0 and 1, in every fourth thread; the next thread has that of row 2.
  static __device__ float from_three_rows(float two) { return two + __shfl_down_sync(~0u, two, 1); }
};

}  // namespace guild::cuda
