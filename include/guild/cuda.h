// The CUDA backend: sm_90a (H100, H200), bfloat16 and float16.
//
// Every function checks its arguments on the host and throws guild::Error if one is wrong.
// Otherwise it only enqueues work on the queue's stream: it does not allocate, synchronise or read
// device memory from the host. A failed CUDA call throws guild::Error too; a function that launches
// several kernels may have launched some of them by then. Calls can be captured in a CUDA graph.
// Results are deterministic.
//
// Pointers are device pointers, except copy_indices' `from`, MoeForward::sort, Meet::report and
// usable's `why`. They are 16-byte aligned, and so is every row, so H and I must be multiples of 8.
// Gate and up weights are contiguous along the same dimension. Limits: 2^31 - 8192 rows, tokens and
// slots; 2^30 rows in weight gradients.
//
// Host threads may call concurrently, on different streams and devices, as long as calls that may
// overlap write different memory: outputs, workspaces and the queue's counter.
#pragma once
#include "guild/error.h"
#include "guild/float8.h"
#include "guild/float8_chunks.h"
#include "guild/steps.h"

struct CUstream_st;  // *CUstream_st is cudaStream_t

namespace guild::cuda {

struct Counters;

// Where a step runs: a stream of the current device, and how many SMs its matrix products may use.
struct Queue {
  CUstream_st* stream = nullptr;
  int sms = 0;  // 0: all
  // (1) in device memory, for products on this stream only, with any initial value: the counter
  // from which thread blocks claim tiles (dynamic scheduling). Faster for large layers, above all
  // with unevenly loaded experts. Null: static scheduling, with the same results. The composites
  // use counters in their workspace instead.
  int32_t* counter = nullptr;
  // Whether other kernels, such as communication, run at the same time. Every product of more than
  // one wave then claims its tiles from the counter, so that none is assigned to a block that still
  // waits for an SM. Otherwise only products of several waves do.
  bool shared = false;
  Counters* counters = nullptr;  // for Guild's own use, in the composites; leave it null
};

// built(): whether this build has CUDA kernels. usable(): whether the current device can run them;
// `why`, unless null, receives what is missing, or "".
bool built();
bool usable(char const** why = nullptr);

// Copies `count` indices, such as a weight's expert_at, from host memory. They travel as kernel
// arguments: the host memory may be freed once the call returns, and a captured graph keeps them.
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
// Computes a schedule from routing.offsets. Both of its arrays are allocated by the caller.
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
