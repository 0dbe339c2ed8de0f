// Token rounding: gives every expert whole tiles of tokens, then writes each token's list of
// experts.
//
//   measure   each token's softmax, and how many tokens chose each expert
//   keys      (E, T): the keys by which an expert ranks its candidates; each expert's target
//   select    one block per expert: the threshold for its candidates, which gives one bit per token
//   lists     transposes the bits to one list per token: where it begins, ids and weights
//
// Only integers are added atomically, so two runs give the same bits.
#include "checks/check.h"
#include "cuda/routing/round_select.cuh"
#include "cuda/warp.cuh"

namespace guild::cuda {
namespace {

constexpr int kListThreads = 512, kListWarps = kListThreads / 32;

// The total length of all blocks' lists, and of those of the blocks before this one.
__device__ int2 sum_blocks(RoundPlan const& p) {
  __shared__ int2 sums;
  if (threadIdx.x == 0) sums = {0, 0};
  __syncthreads();
  int all = 0, before = 0;
#pragma unroll 1
  for (int b = threadIdx.x; b < gridDim.x; b += kListThreads) {
    int const sum = p.block_sums[b];
    all += sum;
    before += b < blockIdx.x ? sum : 0;
  }
  all = __reduce_add_sync(~0u, all);
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&sums.x, all);
    atomicAdd(&sums.y, before);
  }
  __syncthreads();
  return sums;
}

// A block's lists: bits, and where each list begins.
struct BlockLists {
  uint32_t bits[kListTokens][33];  // by token, 32 experts a word; rows in different banks
  int begins[kListTokens];

  // Called by the whole block. begin: where its first list begins.
  __device__ void fill(RoundPlan const& p, int begin) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = int(p.x.experts);
#pragma unroll 1
    for (int part = warp; part < 32; part += kListWarps) {
      int const expert = part * 32 + lane;
      uint32_t const by_expert =
          expert < experts ? p.members[int64_t(blockIdx.x) * experts + expert] : 0;
      uint32_t by_token = 0;
#pragma unroll 8
      for (int t = 0; t < 32; ++t) {
        uint32_t const word = __ballot_sync(~0u, by_expert >> t & 1);
        if (lane == t) by_token = word;
      }
      bits[lane][part] = by_token;
    }
    __syncthreads();
    if (warp == 0) {
      int length = 0;
      for (int part = 0; part < 32; ++part) length += __popc(bits[lane][part]);
      begins[lane] = begin + warp_scan(length) - length;
    }
    __syncthreads();
  }

  // Called by a whole warp: writes one token's experts in ascending order, returns how many.
  __device__ int list(int token, uint16_t* experts) const {
    int const lane = threadIdx.x % 32;
    uint32_t word = bits[token][lane];
    int const count = __popc(word);
    int at = warp_scan(count) - count;
    int const length = __shfl_sync(~0u, at + count, 31);
#pragma unroll 1
    for (; word != 0; word &= word - 1) experts[at++] = uint16_t(lane * 32 + __ffs(word) - 1);
    __syncwarp();
    return length;
  }
};

// Writes the ids and weights of one list, from slot `begin` on. A lane keeps its first expert's
// logit in registers and reads those of experts beyond 32 again.
__device__ void write_list(RoundPlan const& p, int64_t token, uint16_t const* experts, int length,
                           int begin) {
  TokenRounding const& x = p.x;
  Router const& router = x.router;
  int const lane = threadIdx.x % 32;
  float const* const row = static_cast<float const*>(x.logits.data) + token * p.stride;
  float2 const softmax = p.softmaxes[token];
  float const logit = lane < length ? row[experts[lane]] : -INFINITY;
  float shift = softmax.x, factor = 1.f / softmax.y;
  if (weighs_relatively(router)) {
    float top = logit;
#pragma unroll 1
    for (int i = lane + 32; i < length; i += 32) top = fmaxf(top, row[experts[i]]);
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    shift = weight_shift(router.score, top);
  }
  if (router.renormalize) {
    float sum = 0;
#pragma unroll 1
    for (int i = lane; i < length; i += 32) {
      sum += unscaled_weight(router.score, i < 32 ? logit : row[experts[i]], shift);
    }
    factor = factor_of_sum(router, warp_sum(sum), factor);
    if (softmax.y != softmax.y) factor = NAN;
  }
  factor *= float(router.scale);
#pragma unroll 1
  for (int i = lane; i < length; i += 32) {
    float const own = i < 32 ? logit : row[experts[i]];
    int const slot = begin + i;
    x.list_ids[slot] = experts[i];
    static_cast<float*>(x.scores)[slot] = unscaled_weight(router.score, own, shift) * factor;
    if (x.slopes != nullptr) {
      static_cast<float*>(x.slopes)[slot] = weight_slope(router.score, own);
    }
  }
}

__global__ void __launch_bounds__(kListThreads, 4) lists_kernel(RoundPlan p) {
  __shared__ BlockLists lists;
  __shared__ uint16_t experts[kListWarps][kMostRouted];
  TokenRounding const& x = p.x;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t const first = int64_t(blockIdx.x) * kListTokens;
  int2 const sums = sum_blocks(p);
  lists.fill(p, sums.y);
  if (warp == 0 && first + lane < x.tokens) x.token_offsets[first + lane] = lists.begins[lane];
  if (threadIdx.x == 0 && blockIdx.x == 0) x.token_offsets[x.tokens] = sums.x;
#pragma unroll 1
  for (int i = warp; i < kListTokens && first + i < x.tokens; i += kListWarps) {
    int const length = lists.list(i, experts[warp]);
    write_list(p, first + i, experts[warp], length, lists.begins[i]);
    __syncwarp();
  }
  // Clears the slots after the last list.
  int64_t const step = int64_t(gridDim.x) * kListThreads;
#pragma unroll 1
  for (int64_t s = sums.x + int64_t(blockIdx.x) * kListThreads + threadIdx.x; s < p.slots;
       s += step) {
    x.list_ids[s] = -1;
    static_cast<float*>(x.scores)[s] = 0;
    if (x.slopes != nullptr) static_cast<float*>(x.slopes)[s] = 0;
  }
}

}  // namespace

void round_tokens(TokenRounding const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  require_routable(x.experts);
  require_at_most(x.tokens, kMostCounted, "tokens");
  if (x.tokens == 0) {
    cuda_check(cudaMemsetAsync(x.token_offsets, 0, sizeof(int32_t), queue.stream),
               "clearing token_offsets");
    return;
  }
  RoundPlan const plan = select_members(x, queue);
  lists_kernel<<<unsigned(plan.blocks), kListThreads, 0, queue.stream>>>(plan);
  cuda_check(cudaGetLastError(), "launch of round_tokens");
}

}  // namespace guild::cuda
