// dscores[t, k] = sum over parts of score_parts[r] + <dO[t], b2[e of r]>, one warp a slot; sums in
// a fixed order.
#include "alignment.h"
#include "check.h"
#include "element.cuh"
#include "shared/routing.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void score_gradient_kernel(ScoreGradient x, int part_count, int64_t dout_stride,
                                      int64_t bias_stride) {
  int64_t const slot = (blockIdx.x * int64_t(kThreads) + threadIdx.x) / 32;
  int const lane = threadIdx.x % 32;
  if (slot >= x.sizes.rows()) return;
  int const row = x.routing.slot_row[slot];
  float sum = 0;
  if (unsigned(row) < unsigned(x.sizes.rows())) {
    float const* const parts = static_cast<float const*>(x.score_parts) + int64_t(row) * part_count;
    for (int i = lane; i < part_count; i += 32) sum += parts[i];
    if (x.bias.data != nullptr) {
      int64_t const expert = part_of(x.routing.offsets, x.sizes.experts, row);
      T const* const bias = static_cast<T const*>(x.bias.data) + expert * bias_stride;
      int64_t const token = token_of(x.routing.token_offsets, x.sizes.tokens, x.sizes.top_k, slot);
      T const* const dout = static_cast<T const*>(x.dout.data) + token * dout_stride;
      for (int col = lane * 8; col < x.sizes.hidden; col += 256) {
        Eight const b = load_eight(bias + col), d = load_eight(dout + col);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += b.value[i] * d.value[i];
      }
    }
    sum = warp_sum(sum);
  }
  if (lane == 0) static_cast<float*>(x.dscores)[slot] = sum;
}

}  // namespace

void score_gradient(ScoreGradient const& x, Queue queue) {
  check(x);
  Sizes const& s = x.sizes;
  require_16_bit(x.dtype);
  require_multiple_of_8(s.hidden, "hidden");
  require_aligned(x.dout, "dout");
  require_aligned(x.bias, "b_down");
  if (s.rows() == 0) return;
  unsigned const blocks = unsigned((s.rows() * 32 + kThreads - 1) / kThreads);
  with_type(x.dtype, [&](auto element) {
    score_gradient_kernel<decltype(element)><<<blocks, kThreads, 0, queue.stream>>>(
        x, int(score_parts(s)), row_stride(x.dout, s.hidden), row_stride(x.bias, s.hidden));
  });
  cuda_check(cudaGetLastError(), "launch of score_gradient");
}

}  // namespace guild::cuda
