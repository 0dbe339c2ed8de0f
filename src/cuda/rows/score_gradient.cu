// dscores[t, k] = sum over parts of score_parts[r] + <dO[t], b2[e of r]>: one thread per slot, more
// for many parts, a warp where there is a bias; sums in a fixed order.
#include "checks/check.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "cuda/require_runnable.h"
#include "shared/ceil_div.h"
#include "shared/routing.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;

// This lane's part of <dO[t], b2[e of row]>.
template <class T>
__device__ float bias_product(ScoreGradient const& x, int64_t slot, int row, int64_t dout_stride,
                              int64_t bias_stride) {
  int64_t const expert = segment_of(x.routing.offsets, x.sizes.experts, row);
  T const* const bias = static_cast<T const*>(x.bias.data) + expert * bias_stride;
  int64_t const token = token_of(x.routing.token_offsets, x.sizes.tokens, x.sizes.top_k, slot);
  T const* const dout = static_cast<T const*>(x.dout.data) + token * dout_stride;
  float sum = 0;
  for (int col = threadIdx.x % 32 * 8; col < x.sizes.hidden; col += 256) {
    Eight const b = load_eight(bias + col), d = load_eight(dout + col);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += b.value[i] * d.value[i];
  }
  return sum;
}

// 2^lane_bits lanes per slot: 32 where there is a bias.
template <class T>
__global__ void score_gradient_kernel(ScoreGradient x, int part_count, int lane_bits,
                                      int64_t dout_stride, int64_t bias_stride) {
  int64_t const slot = (blockIdx.x * int64_t(kThreads) + threadIdx.x) >> lane_bits;
  int const lanes = 1 << lane_bits, lane = threadIdx.x % lanes;
  bool const any = slot < x.sizes.slot_count();
  int const row = any && x.sizes.tokens > 0 ? x.routing.slot_row[slot] : -1;
  float sum = 0;
  if (unsigned(row) < unsigned(x.sizes.rows())) {
    float const* const parts = static_cast<float const*>(x.score_parts) + int64_t(row) * part_count;
    for (int i = lane; i < part_count; i += lanes) sum += parts[i];
    if (x.bias.data != nullptr) sum += bias_product<T>(x, slot, row, dout_stride, bias_stride);
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (any && lane == 0) static_cast<float*>(x.dscores)[slot] = sum;
}

// log2 of the lanes per slot: at most four parts per lane, up to a whole warp, which a bias always
// gets.
int lane_bits_of(int64_t part_count, bool bias) {
  int bits = 0;
  while (bits < 5 && (bias || part_count > 4 << bits)) ++bits;
  return bits;
}

}  // namespace

void require_runnable(ScoreGradient const& x) {
  check(x);
  require_16_bit(x.dtype);
  require_whole_16_bytes(x.sizes.hidden, "hidden");
  require_aligned(x.dout, "dout");
  require_aligned(x.bias, "b_down");
}

void score_gradient(ScoreGradient const& x, Queue queue) {
  require_runnable(x);
  Sizes const& s = x.sizes;
  if (s.slot_count() == 0) return;
  int const parts = int(score_parts(s)), lane_bits = lane_bits_of(parts, x.bias.data != nullptr);
  unsigned const blocks = unsigned(ceil_div(s.slot_count() << lane_bits, kThreads));
  with_type(x.dtype, [&](auto element) {
    score_gradient_kernel<decltype(element)><<<blocks, kThreads, 0, queue.stream>>>(
        x, parts, lane_bits, row_stride(x.dout, s.hidden), row_stride(x.bias, s.hidden));
  });
  cuda_check(cudaGetLastError(), "launch of score_gradient");
}

}  // namespace guild::cuda
