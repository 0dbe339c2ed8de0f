// Token rounding: whole tiles of tokens for every expert, then each token's list of experts.
//
//   measure   a token's softmax, and how many tokens chose each expert
//   aim       what is asked of each expert
//   keys      (E, T): what ranks an expert's candidates, 0 where a token is none
//   select    a block an expert: the key of the last one taken, by radix select, and where ties end
//   lengths   of the tokens' lists: a token is a member where its key passes the expert's
//   lists     their places, ids and weights
//
// Keys are computed again where they are needed, by the same instructions. Atomic additions of
// integers only count, so two runs give the same bits.
#include "check.h"
#include "round_select.cuh"

namespace guild::cuda {
namespace {

constexpr int kListThreads = 256, kListWarps = kListThreads / 32;

// A warp's token: which experts have it, 32 at a time.
struct Listed {
  float const* row;  // its logits
  float2 softmax;
  float log_sum;
  uint32_t const* chosen;  // a bit an expert
  bool real;

  // mask: (32) words of this warp.
  __device__ Listed(RoundPlan const& p, int64_t token, uint32_t* mask) {
    int const lane = threadIdx.x % 32;
    TokenRounding const& x = p.x;
    mask[lane] = 0;
    __syncwarp();
    real = token < x.tokens && is_real(x, token);
    for (int k = lane; real && k < x.top_k; k += 32) {
      int const id = x.ids[token * x.top_k + k];
      if (unsigned(id) < unsigned(x.experts)) atomicOr(&mask[id / 32], 1u << id % 32);
    }
    __syncwarp();
    chosen = mask;
    row = static_cast<float const*>(x.logits.data) + (real ? token : 0) * p.stride;
    softmax = real ? p.softmaxes[token] : float2{0.f, 1.f};
    log_sum = logf(softmax.y);
  }
  __device__ bool member(RoundPlan const& p, int64_t token, int expert) const {
    if (!real || expert >= p.x.experts) return false;
    bool const has = chosen[expert / 32] >> expert % 32 & 1;
    RoundingTarget const target = p.targets[expert];
    bool const candidate = has != (target.adds != 0);
    if (!candidate) return has;
    uint32_t const key = candidate_key(row[expert], softmax.x, log_sum);
    uint2 const threshold = p.thresholds[expert];
    return key > threshold.x || (key == threshold.x && unsigned(token) < threshold.y);
  }
};

__global__ void __launch_bounds__(kListThreads) lengths_kernel(RoundPlan p) {
  __shared__ uint32_t masks[kListWarps][32];
  __shared__ int lengths[kListTokens];
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t const first = int64_t(blockIdx.x) * kListTokens;
  for (int i = warp; i < kListTokens; i += kListWarps) {
    int64_t const token = first + i;
    Listed const listed(p, token, masks[warp]);
    int length = 0;
#pragma unroll 1
    for (int base = 0; base < p.x.experts; base += 32) {
      length += __popc(__ballot_sync(~0u, listed.member(p, token, base + lane)));
    }
    if (lane == 0) {
      lengths[i] = length;
      if (token < p.x.tokens) p.lengths[token] = length;
    }
    __syncwarp();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int const sum = __reduce_add_sync(~0u, lengths[threadIdx.x]);
    if (threadIdx.x == 0) p.block_sums[blockIdx.x] = sum;
  }
}

// The sum of all blocks' lists, and of those before this block.
__device__ int2 sum_blocks(RoundPlan const& p) {
  __shared__ int2 sums;
  if (threadIdx.x == 0) sums = {0, 0};
  __syncthreads();
  int all = 0, before = 0;
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

// What the list's weights are divided by and shifted by.
__device__ float2 shift_and_factor(RoundPlan const& p, Listed const& listed, int64_t token) {
  Router const& router = p.x.router;
  bool const softmax = router.score == Score::softmax;
  int const lane = threadIdx.x % 32, experts = int(p.x.experts);
  if (!router.renormalize) return {listed.softmax.x, router.scale / listed.softmax.y};
  float top = -INFINITY, sum = 0;
#pragma unroll 1
  for (int base = 0; base < experts; base += 32) {
    if (listed.member(p, token, base + lane)) top = fmaxf(top, listed.row[base + lane]);
  }
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  float const shift = softmax ? top : fminf(top, 0.f);
#pragma unroll 1
  for (int base = 0; base < experts; base += 32) {
    if (listed.member(p, token, base + lane)) {
      sum += unscaled_weight(router.score, listed.row[base + lane], shift);
    }
  }
  sum = warp_sum(sum);
  float const nan_of_softmax = listed.softmax.y != listed.softmax.y ? NAN : 1.f;
  return {shift, router.scale / sum * nan_of_softmax};
}

__global__ void __launch_bounds__(kListThreads) lists_kernel(RoundPlan p) {
  __shared__ uint32_t masks[kListWarps][32];
  __shared__ int begins[kListTokens];
  TokenRounding const& x = p.x;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t const first = int64_t(blockIdx.x) * kListTokens;
  int2 const sums = sum_blocks(p);
  if (warp == 0) {
    int const length = first + lane < x.tokens ? p.lengths[first + lane] : 0;
    int end = length;
    for (int step = 1; step < 32; step *= 2) {
      int const other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    begins[lane] = sums.y + end - length;
    if (first + lane < x.tokens) x.token_offsets[first + lane] = begins[lane];
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) x.token_offsets[x.tokens] = sums.x;
  __syncthreads();
  float *const scores = static_cast<float*>(x.scores), *const slopes =
                                                           static_cast<float*>(x.slopes);
  for (int i = warp; i < kListTokens; i += kListWarps) {
    int64_t const token = first + i;
    Listed const listed(p, token, masks[warp]);
    float2 const weigh = shift_and_factor(p, listed, token);
    int at = begins[i];
#pragma unroll 1
    for (int base = 0; base < x.experts; base += 32) {
      int const e = base + lane;
      bool const member = listed.member(p, token, e);
      unsigned const members = __ballot_sync(~0u, member);
      int const slot = at + __popc(members & ((1u << lane) - 1));
      at += __popc(members);
      if (!member) continue;
      x.list_ids[slot] = e;
      scores[slot] = unscaled_weight(x.router.score, listed.row[e], weigh.x) * weigh.y;
      if (slopes != nullptr) slopes[slot] = unscaled_weight(Score::sigmoid, -listed.row[e], 0.f);
    }
    __syncwarp();
  }
  // Slots that no list takes.
  int64_t const step = int64_t(gridDim.x) * kListThreads;
  for (int64_t s = sums.x + int64_t(blockIdx.x) * kListThreads + threadIdx.x; s < p.slots;
       s += step) {
    x.list_ids[s] = -1;
    scores[s] = 0;
    if (slopes != nullptr) slopes[s] = 0;
  }
}

}  // namespace

void round_tokens(TokenRounding const& x, Queue queue) {
  check(x);
  require(x.dtype == DType::float32, "logits: expected float32 on CUDA");
  if (x.tokens == 0) {
    cuda_check(cudaMemsetAsync(x.token_offsets, 0, sizeof(int32_t), queue.stream),
               "clearing token_offsets");
    return;
  }
  RoundPlan const plan = select_members(x, queue);
  unsigned const blocks = unsigned((x.tokens + kListTokens - 1) / kListTokens);
  lengths_kernel<<<blocks, kListThreads, 0, queue.stream>>>(plan);
  lists_kernel<<<blocks, kListThreads, 0, queue.stream>>>(plan);
  cuda_check(cudaGetLastError(), "launch of round_tokens");
}

}  // namespace guild::cuda
