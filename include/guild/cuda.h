// The CUDA backend: sm_90a (H100, H200), bfloat16 and float16.
//
// Every function checks its arguments on the host, throws guild::Error if one is wrong, and
// otherwise only enqueues work on the queue's stream: no allocation, no synchronisation, no read
// of device memory. It also throws guild::Error if a call of CUDA fails; earlier kernels of a
// function that launches several may have been launched by then. Calls can be captured in a CUDA
// graph, and results are deterministic.
//
// Pointers are device pointers, except copy_indices' `from`, MoeForward::sort, Meet::report and
// usable's `why`. They are 16-byte aligned, and so is every row: H and I are multiples of 8. Gate
// and up have the same contiguous dimension. There are at most 2^31 - 8192 rows, tokens and slots,
// and 2^30 rows in gradients of weights.
//
// Several host threads may call at the same time, on streams and devices of their own, as long as
// no two calls that may run at the same time write the same memory: outputs, workspaces and the
// queue's counter.
#pragma once
#include "guild/error.h"
#include "guild/float8.h"
#include "guild/float8_chunks.h"
#include "guild/steps.h"

struct CUstream_st;  // *CUstream_st is cudaStream_t

namespace guild::cuda {

struct Counters;

// Where a step runs: a stream of the current device, and how many multiprocessors its matrix
// products may fill.
struct Queue {
  CUstream_st* stream = nullptr;
  int sms = 0;  // 0: all
  // One int of device memory for products on this stream, with any initial value: a counter from
  // which blocks claim tiles (dynamic scheduling). That is faster for large layers, most of all
  // where experts have unequal loads. Null: static scheduling, with the same results. The
  // composites have counters in their workspace.
  int32_t* counter = nullptr;
  // Whether other kernels, such as communication, run at the same time: blocks of products then
  // claim all of their tiles from the counter, so that none is held by a block that still waits for
  // a multiprocessor.
  bool shared = false;
  Counters* counters = nullptr;  // for Guild's own use, in the composites; leave it null
};

// Whether this build has CUDA kernels, and whether the current device can run them; if it cannot,
// `why` (if given) says what is missing.
bool built();
bool usable(char const** why = nullptr);

// Copies `count` indices from host memory, such as a weight's expert_at. They are read during the
// call and passed as kernel arguments, which a captured graph keeps.
void copy_indices(int32_t const* from, int64_t count, int32_t* to, Queue queue = {});

void route(Route const& args, Queue queue = {});
void router_gradient(RouterGradient const& args, Queue queue = {});
void round_tokens(TokenRounding const& args, Queue queue = {});
void balance_sums(BalanceSums const& args, Queue queue = {});
void balance_gradient(BalanceGradient const& args, Queue queue = {});
void sort_by_expert(Sort const& args, Queue queue = {});
void up_projection(UpProjection const& args, Queue queue = {});
void down_projection(DownProjection const& args, Queue queue = {});
void combine(Combine const& args, Queue queue = {});
void down_gradient(DownGradient const& args, Queue queue = {});
void score_gradient(ScoreGradient const& args, Queue queue = {});
void up_gradient(UpGradient const& args, Queue queue = {});
// Fills both arrays of a schedule, in the caller's memory, from routing.offsets.
void schedule_weight_gradients(Sizes const& sizes, Routing const& routing,
                               WeightSchedule const& schedule, Queue queue = {});
void up_weight_gradient(UpWeightGradient const& args, Queue queue = {});
void down_weight_gradient(DownWeightGradient const& args, Queue queue = {});
void bias_gradient(BiasGradient const& args, Queue queue = {});
void grouped_gemm(GroupedGemm const& args, Queue queue = {});
void quantize_rows(QuantizeRows const& args, Queue queue = {});
void quantize_weights(QuantizeWeights const& args, Queue queue = {});
void quantize_chunks(QuantizeChunks const& args, Queue queue = {});
void chunk_product(ChunkProduct const& args, Queue queue = {});
void scaled_grouped_gemm(ScaledGroupedGemm const& args, Queue queue = {});
void scaled_up(ScaledUp const& args, Queue queue = {});
void scaled_down_gradient(ScaledDownGradient const& args, Queue queue = {});
void moe_forward(MoeForward const& args, Queue queue = {});
void moe_backward(MoeBackward const& args, Queue queue = {});
void moe_weight_gradients(MoeWeightGradients const& args, Queue queue = {});

}  // namespace guild::cuda
