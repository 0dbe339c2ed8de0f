// The CUDA backend's functions in a build without CUDA: they throw.
#include "guild/cuda.h"
#include "guild/microscaling.h"
#include "guild/router_logits.h"

#include "cuda/rows/all_rows.h"
#include "cuda/rows/ungrouped_rows.h"
#include "cuda/shared_expert.h"

#include "guild/peer_layer.h"

namespace guild::cuda {

namespace {
[[noreturn]] void absent() {
  throw Error("CUDA: this build of Guild has no CUDA kernels; build with GUILD_CUDA=ON and nvcc");
}
}  // namespace

bool built() { return false; }
bool usable(char const** why) {
  if (why != nullptr) *why = "this build has no CUDA kernels";
  return false;
}

void copy_indices(int32_t const*, int64_t, int32_t*, Queue) { absent(); }
void route(Route const&, Queue) { absent(); }
void router_logits(RouterLogits const&, Queue) { absent(); }
void route_tokens(RouterLogits const&, Route const&, Queue) { absent(); }
void router_gradient(RouterGradient const&, Queue) { absent(); }
void round_tokens(TokenRounding const&, Queue) { absent(); }
void balance_sums(BalanceSums const&, Queue) { absent(); }
void balance_gradient(BalanceGradient const&, Queue) { absent(); }
void sort_by_expert(Sort const&, Queue) { absent(); }
void up_projection(UpProjection const&, Queue) { absent(); }
void down_projection(DownProjection const&, Queue) { absent(); }
void combine(Combine const&, Queue) { absent(); }
void down_gradient(DownGradient const&, Queue) { absent(); }
void score_gradient(ScoreGradient const&, Queue) { absent(); }
void up_gradient(UpGradient const&, Queue) { absent(); }
void schedule_weight_gradients(Sizes const&, Routing const&, WeightSchedule const&, Queue) {
  absent();
}
void up_weight_gradient(UpWeightGradient const&, Queue) { absent(); }
void down_weight_gradient(DownWeightGradient const&, Queue) { absent(); }
void bias_gradient(BiasGradient const&, Queue) { absent(); }
void grouped_gemm(GroupedGemm const&, Queue) { absent(); }
void quantize_rows(QuantizeRows const&, Queue) { absent(); }
void quantize_weights(QuantizeWeights const&, Queue) { absent(); }
void quantize_micro(QuantizeMicro const&, Queue) { absent(); }
void regroup_micro(RegroupMicro const&, Queue) { absent(); }
void quantize_chunks(QuantizeChunks const&, Queue) { absent(); }
void chunk_product(ChunkProduct const&, Queue) { absent(); }
void scaled_grouped_gemm(ScaledGroupedGemm const&, Queue) { absent(); }
void scaled_up(ScaledUp const&, Queue) { absent(); }
void scaled_down_gradient(ScaledDownGradient const&, Queue) { absent(); }
void all_rows(AllRows const&, Queue) { absent(); }
void clear_ungrouped_rows(UngroupedRows const&, Queue const&) { absent(); }
void moe_forward(MoeForward const&, Queue) { absent(); }
bool fuses_shared_experts(Sizes const&) { return false; }
int64_t moe_forward_workspace_bytes(Sizes const&, DType, int64_t) { absent(); }
void moe_forward(MoeForward const&, SharedExpert const&, Queue) { absent(); }
void moe_forward(MoeForward const&, LayerRouter const&, SharedExpert const*, Queue) { absent(); }
void moe_backward(MoeBackward const&, Queue) { absent(); }
void moe_weight_gradients(MoeWeightGradients const&, Queue) { absent(); }
void publish(Publish const&, Queue) { absent(); }
void meet(Meet const&, Queue) { absent(); }
void tables(Tables const&, Queue) { absent(); }
void pull(Pull const&, Queue) { absent(); }
void push(Push const&, Queue) { absent(); }
void collect(Collect const&, Queue) { absent(); }
void push_scores(PushScores const&, Queue) { absent(); }
void clear_scores(ReturnedScores const&, Queue) { absent(); }
void collect_scores(ReturnedScores const&, Queue) { absent(); }
void peer_forward(PeerForward const&, Queue) { absent(); }
void peer_backward(PeerBackward const&, Queue) { absent(); }

}  // namespace guild::cuda
