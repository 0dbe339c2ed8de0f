// Sums over tokens for balancing a router, and their gradient: several lanes of a warp per token.
//
//   sums      one block per chunk of a sequence's tokens: each thread sums its experts over its
//             tokens, then the block adds up its threads in order
//   add up    adds up the chunks of each sequence, always in the same order
//
// Only integers are added atomically, so two runs give the same bits.
#include "checks/check.h"
#include "cuda/routing/router.cuh"
#include "shared/balancing.h"

namespace guild::cuda {
namespace {

// p of this lane's experts, and the terms of the softmax.
template <class S>
struct LaneShares {
  float p[S::per_lane];
  float top, inverse;  // softmax_e = exp(logit_e - top) * inverse
  float logsumexp;

  __device__ LaneShares(Score score, Seat<S> const& seat, LaneLogits<S> const& logits) {
    top = logits.top();
    float const sum_of_exp = logits.sum_of_exp(top);
    inverse = 1.f / sum_of_exp;
    bool const nan = lanes_any(seat, any_nan(logits.value));
    logsumexp = isinf(top) && !nan ? top : top + logf(sum_of_exp);
    float const shift = weight_shift(score, top);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < S::per_lane; ++i) {
      p[i] = i < logits.count ? unscaled_weight(score, logits.value[i], shift) : 0.f;
      sum += p[i];
    }
    float const all = lanes_sum<S>(sum);
    float const factor = score == Score::softmax ? inverse : all == 0 ? 0.f : 1.f / all;
#pragma unroll
    for (float& v : p) v *= factor;
  }
};

__device__ bool counts_at_all(uint8_t const* token_mask, int64_t token) {
  return token_mask == nullptr || token_mask[token] != 0;
}

template <class S>
__device__ void count_choices(BalanceSums const& x, Seat<S> const& seat, int64_t token,
                              int* count) {
  for (int k = seat.lane; k < x.top_k; k += S::lanes) {
    int const id = x.ids[token * x.top_k + k];
    if (unsigned(id) < unsigned(x.experts)) atomicAdd(&count[id], 1);
  }
}

// Blocks per multiprocessor. Without this bound the compiler may aim at more, and spill.
constexpr int sums_at_once(int per_lane) { return per_lane <= 16 ? 4 : 2; }

template <class S>
__global__ void __launch_bounds__(kRouterThreads, sums_at_once(S::per_lane)) balance_sums_kernel(
    BalanceSums x, BalanceWorkspace partial, int64_t stride, int64_t chunks, Deal deal) {
  __shared__ float shares[S::tokens][S::experts];
  __shared__ float squares[S::tokens];
  __shared__ int count[S::experts];
  Seat<S> const seat;
  int const experts = int(x.experts), thread = int(threadIdx.x);
  for (int e = thread; e < experts; e += kRouterThreads) count[e] = 0;
  __syncthreads();
  int64_t const length = x.tokens / x.sequences, part = ceil_div(length, chunks);
  int64_t const first = blockIdx.x / chunks * length, from = blockIdx.x % chunks * part;
  int64_t const begin = first + min(from, length), end = first + min(from + part, length);
  float sum[S::per_lane] = {}, square = 0;
  for (int64_t base = begin; base < end; base += S::tokens) {
    int64_t const token = min(base + seat.token_in_block, end - 1);
    bool const real = base + seat.token_in_block < end && counts_at_all(x.token_mask, token);
    LaneLogits<S> const logits(deal, seat,
                               static_cast<float const*>(x.logits.data) + token * stride);
    LaneShares<S> const of(x.score, seat, logits);
    if (!real) continue;  // after the last shuffle of this iteration
    square += of.logsumexp * of.logsumexp;
#pragma unroll
    for (int i = 0; i < S::per_lane; ++i) sum[i] += of.p[i];
    count_choices(x, seat, token, count);
  }
#pragma unroll
  for (int i = 0; i < S::per_lane; ++i) {
    shares[seat.token_in_block][seat.lane * S::per_lane + i] = sum[i];
  }
  if (seat.lane == 0) squares[seat.token_in_block] = square;
  __syncthreads();
  int64_t const row = int64_t(blockIdx.x) * experts;
  for (int e = thread; e < experts; e += kRouterThreads) {
    float total = 0;
    for (int t = 0; t < S::tokens; ++t) total += shares[t][e];
    static_cast<float*>(partial.shares)[row + e] = total;
    static_cast<int*>(partial.counts)[row + e] = count[e];
  }
  if (thread == 0) {
    float total = 0;
    for (int t = 0; t < S::tokens; ++t) total += squares[t];
    static_cast<float*>(partial.squares)[blockIdx.x] = total;
  }
}

// A block adds up 32 columns of a sequence: experts, and one column for the squares. Each warp sums
// a slice of the chunks, then one warp sums the slices.
constexpr int kSlices = 16;

__global__ void __launch_bounds__(32 * kSlices) add_up_kernel(BalanceSums x,
                                                              BalanceWorkspace partial,
                                                              int64_t chunks, int blocks) {
  __shared__ float sums[kSlices][32];
  __shared__ int counts[kSlices][32];
  int const lane = int(threadIdx.x % 32), slice = int(threadIdx.x / 32);
  int64_t const sequence = blockIdx.x / blocks, e = blockIdx.x % blocks * 32 + lane;
  int64_t const length = ceil_div(chunks, kSlices);
  int64_t const from = min(slice * length, chunks), to = min(from + length, chunks);
  float sum = 0;
  int count = 0;
#pragma unroll 8
  for (int64_t chunk = sequence * chunks + from; chunk < sequence * chunks + to; ++chunk) {
    if (e == x.experts) {
      sum += static_cast<float const*>(partial.squares)[chunk];
    } else if (e < x.experts) {
      sum += static_cast<float const*>(partial.shares)[chunk * x.experts + e];
      count += static_cast<int const*>(partial.counts)[chunk * x.experts + e];
    }
  }
  sums[slice][lane] = sum;
  counts[slice][lane] = count;
  __syncthreads();
  if (slice != 0 || e > x.experts) return;
  for (int other = 1; other < kSlices; ++other) {
    sum += sums[other][lane];
    count += counts[other][lane];
  }
  if (e == x.experts) {
    static_cast<float*>(x.squares)[sequence] = sum;
  } else {
    static_cast<float*>(x.shares)[sequence * x.experts + e] = sum;
    x.counts[sequence * x.experts + e] = count;
  }
}

// With dp and dq the gradients of shares and squares, dot = sum of p dp over the experts:
//   dlogit_e = p_e (dp_e - dot) + 2 logsumexp softmax_e dq, the first term times the slope where p
//   is not a softmax
template <class S>
__global__ void __launch_bounds__(kRouterThreads) balance_gradient_kernel(BalanceGradient x,
                                                                          int64_t stride,
                                                                          int64_t out_stride,
                                                                          Deal deal) {
  Seat<S> const seat;
  if (seat.token - threadIdx.x % 32 / S::lanes >= x.tokens) return;  // the whole warp
  int64_t const token = min(seat.token, x.tokens - 1);
  LaneLogits<S> const logits(deal, seat, static_cast<float const*>(x.logits.data) + token * stride);
  LaneShares<S> const of(x.score, seat, logits);
  int64_t const sequence = token / (x.tokens / x.sequences);
  float const* const dp = static_cast<float const*>(x.dshares) + sequence * x.experts;
  float dot = 0;
#pragma unroll
  for (int i = 0; i < S::per_lane; ++i) {
    if (i < logits.count) dot += of.p[i] * dp[logits.first + i];
  }
  dot = lanes_sum<S>(dot);
  if (seat.token >= x.tokens) return;
  bool const real = counts_at_all(x.token_mask, token), softmax = x.score == Score::softmax;
  float const dq = static_cast<float const*>(x.dsquares)[sequence];
  float const square = 2 * of.logsumexp * dq;
  float* const out = static_cast<float*>(x.dlogits.data) + token * out_stride;
#pragma unroll
  for (int i = 0; i < S::per_lane; ++i) {
    if (i >= logits.count) break;
    float const slope = softmax ? 1.f : weight_slope(x.score, logits.value[i]);
    float const of_p = of.p[i] * (dp[logits.first + i] - dot) * slope;
    float const of_square = square * expf(logits.value[i] - of.top) * of.inverse;
    float const d = dq == 0 ? of_p : of_p + of_square;  // logsumexp may be infinite
    out[logits.first + i] = real ? d : 0.f;
  }
}

}  // namespace

void balance_sums(BalanceSums const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  Carver carver(x.workspace);
  BalanceWorkspace const partial = carve_balance(carver, x.tokens, x.experts, x.sequences);
  int64_t const chunks = balance_chunks(x.tokens, x.sequences);
  int64_t const stride = row_stride(x.logits, x.experts);
  if (chunks > 0) {
    with_shape(x.experts, 1, by_four(x.logits, stride), [&](auto shape, Deal const& deal) {
      using S = decltype(shape);
      balance_sums_kernel<S><<<unsigned(chunks * x.sequences), kRouterThreads, 0, queue.stream>>>(
          x, partial, stride, chunks, deal);
    });
  }
  int const blocks = int(x.experts / 32 + 1);  // of a sequence: experts + 1 columns
  add_up_kernel<<<unsigned(x.sequences * blocks), 32 * kSlices, 0, queue.stream>>>(x, partial,
                                                                                   chunks, blocks);
  cuda_check(cudaGetLastError(), "launch of balance_sums");
}

void balance_gradient(BalanceGradient const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  if (x.tokens == 0) return;
  int64_t const stride = row_stride(x.logits, x.experts);
  int64_t const out_stride = row_stride(x.dlogits, x.experts);
  with_shape(x.experts, 1, by_four(x.logits, stride), [&](auto shape, Deal const& deal) {
    using S = decltype(shape);
    balance_gradient_kernel<S><<<router_blocks<S>(x.tokens), kRouterThreads, 0, queue.stream>>>(
        x, stride, out_stride, deal);
  });
  cuda_check(cudaGetLastError(), "launch of balance_gradient");
}

}  // namespace guild::cuda
