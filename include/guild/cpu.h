// The CPU backend: the reference for correct results, and the fallback where there is no GPU.
//
// Every function checks its arguments, throws guild::Error if one is wrong, and is deterministic
// for any number of OpenMP threads. Element types: float64, float32, bfloat16 and float16.
#pragma once
#include "guild/error.h"
#include "guild/float8.h"
#include "guild/float8_chunks.h"
#include "guild/steps.h"

namespace guild::cpu {

void route(Route const& args);
void router_gradient(RouterGradient const& args);
void round_tokens(TokenRounding const& args);
void balance_sums(BalanceSums const& args);
void balance_gradient(BalanceGradient const& args);
void sort_by_expert(Sort const& args);
void up_projection(UpProjection const& args);
void down_projection(DownProjection const& args);
void combine(Combine const& args);
void down_gradient(DownGradient const& args);
void score_gradient(ScoreGradient const& args);
void up_gradient(UpGradient const& args);
void up_weight_gradient(UpWeightGradient const& args);
void down_weight_gradient(DownWeightGradient const& args);
void bias_gradient(BiasGradient const& args);
void grouped_gemm(GroupedGemm const& args);
void quantize_rows(QuantizeRows const& args);
void quantize_weights(QuantizeWeights const& args);
void quantize_chunks(QuantizeChunks const& args);
void chunk_product(ChunkProduct const& args);
void scaled_grouped_gemm(ScaledGroupedGemm const& args);
void scaled_up(ScaledUp const& args);
void scaled_down_gradient(ScaledDownGradient const& args);
void moe_forward(MoeForward const& args);
void moe_backward(MoeBackward const& args);
void moe_weight_gradients(MoeWeightGradients const& args);

}  // namespace guild::cpu
