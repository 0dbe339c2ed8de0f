// torch.ops.guild: the schema of every op and its one kernel for CPU and CUDA tensors.
//
// LibTorch stable ABI with TORCH_TARGET_VERSION 2.10, no Python C API: one library serves every
// torch from 2.10 on and every Python. Fake kernels and gradients are in python/guild/_torch.
#include <torch/csrc/stable/library.h>

#include <string>

#include "torch/ops.h"
#include "torch/quantize.h"

namespace guild::binding {
namespace {

// The activation's scalars, in the order of activation_of().
#define GUILD_ACTIVATION \
  "int kind, bool gated, float alpha, float limit, float up_offset, bool clamp_after"

// A low-rank term of a step's product: both or none.
#define GUILD_LOW_RANK ", Tensor? low_rank_t=None, Tensor? low_rank_b=None"

// Weights that are lists of matrices that are not evenly spaced; see ops.h.
#define GUILD_LISTS ", Tensor? experts_at=None"

bool cuda_built() { return cuda::built(); }

// Why the current CUDA device cannot be used; empty if it can.
std::string cuda_reason() {
  char const* why = "";
  return cuda::usable(&why) ? "" : why;
}

void define_machine(Library& m) {
  m.def("cuda_built() -> bool");
  m.def("cuda_reason() -> str");
  m.def("num_sms() -> int");
  m.def("set_num_sms(int count, bool shared) -> ()");
}

void define_routing(Library& m) {
  m.def(
      "route(Tensor logits, Tensor? selection_bias, Tensor? token_mask, int top_k, int score, bool "
      "renormalize, float scale, int groups, int top_groups, float sum_floor, int "
      "group_score) -> (Tensor scores, Tensor ids, Tensor slopes)");
  m.def("router_logits(Tensor x, Tensor weight) -> Tensor");
  m.def(
      "route_tokens(Tensor x, Tensor weight, Tensor? selection_bias, Tensor? token_mask, int "
      "top_k, int score, bool renormalize, float scale, int groups, int top_groups, float "
      "sum_floor, int group_score) -> (Tensor scores, Tensor ids, Tensor slopes)");
  m.def(
      "route_backward(Tensor dscores, Tensor scores, Tensor ids, Tensor? slopes, Tensor? logits, "
      "int experts, int score, bool renormalize, float scale, Tensor? token_offsets=None, Tensor? "
      "like=None, float sum_floor=0.0) -> Tensor");
  m.def(
      "round_tokens(Tensor logits, Tensor ids, Tensor? seed, int score, bool renormalize, float "
      "scale, int rounding, int tile, float sum_floor) -> (Tensor scores, Tensor ids, Tensor "
      "slopes, Tensor token_offsets)");
  m.def(
      "balance_sums(Tensor logits, Tensor ids, Tensor? token_mask, int score, int sequences) -> "
      "(Tensor shares, Tensor squares, Tensor counts)");
  m.def(
      "balance_sums_backward(Tensor dshares, Tensor dsquares, Tensor logits, Tensor? token_mask, "
      "int score) -> Tensor");
  m.def(
      "sort_by_expert(Tensor ids, Tensor scores, int experts, Tensor? token_offsets=None) -> "
      "(Tensor offsets, Tensor row_token, Tensor slot_row, Tensor row_score)");
}

void define_layers(Library& m) {
  m.def(
      "moe_forward(Tensor x, Tensor ids, Tensor scores, Tensor? token_offsets, Tensor? residual, "
      "Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, bool keep" GUILD_LISTS
      ") -> (Tensor o, Tensor h, Tensor offsets, "
      "Tensor row_token, Tensor slot_row, Tensor row_score)");
  m.def(
      "moe_backward(Tensor dout, Tensor x, Tensor h, Tensor offsets, Tensor row_token, Tensor "
      "slot_row, Tensor row_score, Tensor? token_offsets, Tensor w_up, Tensor? w_gate, Tensor "
      "w_down, Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int wanted" GUILD_LISTS
      ") -> (Tensor dx, Tensor dscores, Tensor "
      "dw_up, Tensor dw_gate, Tensor dw_down, Tensor db_up, Tensor db_down)");
  m.def(
      "experts_forward(Tensor x, Tensor offsets, Tensor w_up, Tensor? w_gate, Tensor w_down, "
      "Tensor? b_up, Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, bool keep" GUILD_LISTS ") -> (Tensor o, Tensor h)");
  m.def(
      "experts_backward(Tensor dout, Tensor x, Tensor h, Tensor offsets, Tensor w_up, Tensor? "
      "w_gate, Tensor w_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int wanted" GUILD_LISTS
      ") -> (Tensor dx, Tensor dw_up, Tensor "
      "dw_gate, Tensor dw_down, Tensor db_up, Tensor db_down)");
  m.def(
      "data_gradients(Tensor dout, Tensor h, Tensor offsets, Tensor? row_token, Tensor? slot_row, "
      "Tensor? row_score, Tensor? token_offsets, Tensor w_up, Tensor? w_gate, Tensor w_down, "
      "Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int wanted, Tensor(a!)? db_up=None, Tensor(b!)? "
      "db_down=None, bool accumulate=False" GUILD_LISTS
      ") -> (Tensor dx, Tensor dscores, Tensor dh, Tensor "
      "a_scaled)");
}

// Forward without gradients: into the caller's tensor, and with as few arguments as possible.
void define_inference(Library& m) {
  m.def(
      "moe_forward_out(Tensor x, Tensor ids, Tensor scores, Tensor? token_offsets, Tensor? "
      "residual, Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? "
      "b_down, " GUILD_ACTIVATION ", bool interleaved, bool transposed, Tensor(a!) out" GUILD_LISTS
      ") -> Tensor offsets");
  m.def(
      "moe_layer_out(Tensor x, Tensor router, Tensor? selection_bias, Tensor? token_mask, int "
      "top_k, int score, bool renormalize, float scale, int groups, int top_groups, float "
      "sum_floor, int group_score, Tensor? residual, Tensor w_up, Tensor w_down, Tensor? b_up, "
      "Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, Tensor(a!) out) -> Tensor offsets");
  m.def(
      "experts_forward_out(Tensor x, Tensor offsets, Tensor w_up, Tensor? w_gate, Tensor w_down, "
      "Tensor? b_up, Tensor? b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, Tensor(a!) out" GUILD_LISTS ") -> ()");
  m.def(
      "infer_experts(Tensor x, Tensor ids, Tensor scores, Tensor? residual, Tensor w_up, Tensor "
      "w_down, Tensor? b_up, Tensor? b_down, Tensor settings) -> (Tensor o, Tensor offsets)");
  m.def(
      "infer_layer(Tensor x, Tensor router, Tensor? selection_bias, Tensor? residual, Tensor? "
      "shared_up, Tensor? shared_down, Tensor? shared_scale, Tensor? shared_gate, Tensor w_up, "
      "Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor settings) -> (Tensor o, Tensor "
      "offsets)");
  m.def("infer_shared(Tensor x, Tensor w_up, Tensor w_down, Tensor settings) -> Tensor");
}

void define_steps(Library& m) {
  m.def(
      "up_projection(Tensor x, Tensor offsets, Tensor? row_token, Tensor w_up, Tensor? w_gate, "
      "Tensor? b_up, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, bool keep" GUILD_LOW_RANK GUILD_LISTS
      ") -> (Tensor a, Tensor h)");
  m.def(
      "down_projection(Tensor a, Tensor offsets, Tensor w_down, Tensor? b_down, bool "
      "transposed" GUILD_LOW_RANK GUILD_LISTS ") -> Tensor");
  m.def(
      "combine(Tensor y, Tensor slot_row, Tensor? slot_score, Tensor? token_offsets=None, Tensor? "
      "residual=None, Tensor? dlogits=None, Tensor? ids=None, Tensor? router=None) -> Tensor");
  m.def(
      "down_gradient(Tensor dout, Tensor h, Tensor offsets, Tensor? row_token, Tensor? row_score, "
      "Tensor w_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, Tensor(a!)? db_up=None, Tensor(b!)? db_down=None, "
      "bool accumulate=False" GUILD_LOW_RANK GUILD_LISTS
      ") -> (Tensor dh, Tensor a_scaled, Tensor score_parts)");
  m.def(
      "score_gradient(Tensor score_parts, Tensor slot_row, Tensor offsets, Tensor dout, Tensor? "
      "b_down, int intermediate, Tensor? token_offsets=None) -> Tensor");
  m.def(
      "up_gradient(Tensor dh, Tensor offsets, Tensor w_up, Tensor? w_gate, bool gated, bool "
      "interleaved, bool transposed" GUILD_LOW_RANK GUILD_LISTS ") -> Tensor");

  m.def(
      "weight_gradients_out(Tensor x, Tensor dout, Tensor dh, Tensor a_scaled, Tensor offsets, "
      "Tensor? row_token, Tensor(a!)? dw_up, Tensor(b!)? dw_gate, Tensor(c!)? dw_down, bool gated, "
      "bool interleaved, bool transposed, bool accumulate" GUILD_LISTS ") -> ()");
  m.def(
      "up_weight_gradient_out(Tensor x, Tensor dh, Tensor offsets, Tensor? row_token, Tensor(a!) "
      "dw_up, Tensor(b!)? dw_gate, bool gated, bool interleaved, bool transposed, bool "
      "accumulate" GUILD_LISTS ") -> ()");
  m.def(
      "down_weight_gradient_out(Tensor dout, Tensor a, Tensor offsets, Tensor? row_token, "
      "Tensor(a!) dw_down, bool transposed, bool accumulate" GUILD_LISTS ") -> ()");
  m.def(
      "bias_gradient_out(Tensor m, Tensor offsets, Tensor? row_token, Tensor? row_score, "
      "Tensor(a!) db, bool accumulate) -> ()");

  m.def("expert_view(Tensor first, int experts, int stride) -> Tensor");
  m.def("expert_table(Tensor like, Tensor indices) -> Tensor");
  m.def(
      "grouped_mm(Tensor mat_a, Tensor mat_b, Tensor? offs, Tensor? bias, bool float_out, Tensor? "
      "a_at=None, Tensor? b_at=None) -> Tensor");
  m.def(
      "grouped_mm_out(Tensor mat_a, Tensor mat_b, Tensor? offs, Tensor? bias, Tensor(a!) out, "
      "bool accumulate, Tensor? a_at=None, Tensor? b_at=None, Tensor? out_at=None) -> ()");
  m.def("pair_up(Tensor x, Tensor w_up, Tensor offsets, Tensor? bias, " GUILD_ACTIVATION
        ", bool interleaved) -> (Tensor a, Tensor h)");
  m.def("pair_down(Tensor a, Tensor? aux, Tensor w_down, Tensor offsets, Tensor? bias, "  //
        GUILD_ACTIVATION ", bool interleaved) -> Tensor");
}

// Rows between ranks. They write to memory that `peers` points to, which torch does not see.
void define_exchange(Library& m) {
  m.def("peer_memory_sizes(int ranks, int[] memory) -> (int, int, int)");
  m.def(
      "peer_publish(Tensor peers, int[] memory, Tensor rows, Tensor? ids, Tensor? scores, int "
      "experts) -> Tensor");
  m.def(
      "peer_meet(Tensor peers, int[] memory, bool published, float seconds, int[] facts, "
      "Tensor(a!) report, Tensor? needed=None, int capacity=0) -> ()");
  m.def(
      "peer_tables(Tensor peers, int[] memory, int top_k, int experts, Tensor like) -> (Tensor "
      "ids, Tensor scores, Tensor tokens)");
  m.def("peer_pull(Tensor peers, int[] memory, Tensor ids, Tensor like) -> Tensor");
  m.def(
      "peer_push(Tensor peers, int[] memory, Tensor y, Tensor row_of, Tensor? scores, Tensor? "
      "token_offsets, Tensor tokens, bool by_slot) -> ()");
  m.def(
      "peer_collect(Tensor peers, int[] memory, Tensor token_row, Tensor like, Tensor? residual) "
      "-> Tensor");
  m.def("peer_push_scores(Tensor peers, int[] memory, Tensor ids, Tensor scores) -> ()");
  m.def(
      "peer_forward(Tensor peers, int[] memory, float seconds, int[] facts, int[] facts_returned, "
      "Tensor(a!) report, int[] streams, Tensor x, Tensor ids, Tensor scores, int experts, Tensor? "
      "residual, Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? "
      "b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, bool keep) -> (Tensor o, Tensor rows, Tensor h, Tensor "
      "offsets, Tensor row_token, Tensor slot_row, Tensor row_score, Tensor token_row, Tensor "
      "by_slot, Tensor counts, Tensor own_offsets)");
  m.def(
      "peer_backward(Tensor peers, int[] memory, float seconds, int[] facts, int[] facts_returned, "
      "Tensor(a!) report, int[] streams, Tensor dout, Tensor rows, Tensor h, Tensor offsets, "
      "Tensor row_token, Tensor slot_row, Tensor row_score, Tensor token_row, Tensor by_slot, "
      "Tensor counts, Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? "
      "b_down, " GUILD_ACTIVATION
      ", bool interleaved, bool transposed, int wanted) -> (Tensor dx, Tensor dscores, Tensor "
      "dw_up, Tensor dw_gate, Tensor dw_down, Tensor db_up, Tensor db_down)");
}

// One kernel for both keys: the backend follows from the first tensor's device.
void define_float8(Library& m) {
  m.def(
      "scaled_grouped_mm_out(Tensor a, Tensor a_scales, int a_format, Tensor b, Tensor b_scales, "
      "int b_format, Tensor offs, Tensor(a!) out, int halves=1, Tensor? bias=None) -> ()");
  m.def(
      "scaled_up_out(Tensor x, Tensor x_scales, int x_format, Tensor offsets, Tensor? row_token, "
      "Tensor w_up, Tensor up_scales, Tensor? w_gate, Tensor? gate_scales, Tensor? b_up, int kind, "
      "bool gated, float alpha, float limit, float up_offset, bool clamp_after, bool interleaved, "
      "int format, int scale, Tensor(a!)? h, Tensor(b!)? h_codes, Tensor(c!)? h_scales, Tensor(d!) "
      "a, "
      "Tensor(e!) a_scales) -> ()");
  m.def(
      "scaled_down_gradient_out(Tensor dout, Tensor dout_scales, int dout_format, Tensor offsets, "
      "Tensor? row_token, Tensor? row_score, Tensor w_down, Tensor w_scales, Tensor? h, Tensor? "
      "h_codes, Tensor? h_scales, int kind, bool gated, float alpha, float limit, float up_offset, "
      "bool clamp_after, bool interleaved, int format, int scale, Tensor(a!) dh_codes, Tensor(b!) "
      "dh_scales, Tensor(c!)? dh, Tensor(d!)? a_scaled, Tensor(e!)? score_parts, Tensor(f!)? "
      "dh_chunks=None, Tensor(g!)? dh_chunk_scales=None, Tensor(h!)? a_chunks=None, Tensor(i!)? "
      "a_chunk_scales=None) -> ()");
}

void implement_float8(Library& m) {
  m.impl("scaled_grouped_mm_out", TORCH_BOX(&scaled_grouped_mm_out));
  m.impl("scaled_up_out", TORCH_BOX(&scaled_up_out));
  m.impl("scaled_down_gradient_out", TORCH_BOX(&scaled_down_gradient_out));
}

void implement(Library& m) {
  m.impl("route", TORCH_BOX(&route));
  m.impl("router_logits", TORCH_BOX(&router_logits));
  m.impl("route_tokens", TORCH_BOX(&route_tokens));
  m.impl("route_backward", TORCH_BOX(&route_backward));
  m.impl("round_tokens", TORCH_BOX(&round_tokens));
  m.impl("balance_sums", TORCH_BOX(&balance_sums));
  m.impl("balance_sums_backward", TORCH_BOX(&balance_sums_backward));
  m.impl("sort_by_expert", TORCH_BOX(&sort_by_expert));
  m.impl("moe_forward", TORCH_BOX(&moe_forward));
  m.impl("moe_forward_out", TORCH_BOX(&moe_forward_out));
  m.impl("moe_layer_out", TORCH_BOX(&moe_layer_out));
  m.impl("infer_experts", TORCH_BOX(&infer_experts));
  m.impl("infer_layer", TORCH_BOX(&infer_layer));
  m.impl("infer_shared", TORCH_BOX(&infer_shared));
  m.impl("moe_backward", TORCH_BOX(&moe_backward));
  m.impl("experts_forward", TORCH_BOX(&experts_forward));
  m.impl("experts_forward_out", TORCH_BOX(&experts_forward_out));
  m.impl("experts_backward", TORCH_BOX(&experts_backward));
  m.impl("data_gradients", TORCH_BOX(&data_gradients));
  m.impl("up_projection", TORCH_BOX(&up_projection));
  m.impl("down_projection", TORCH_BOX(&down_projection));
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("down_gradient", TORCH_BOX(&down_gradient));
  m.impl("score_gradient", TORCH_BOX(&score_gradient));
  m.impl("up_gradient", TORCH_BOX(&up_gradient));
  m.impl("weight_gradients_out", TORCH_BOX(&weight_gradients_out));
  m.impl("up_weight_gradient_out", TORCH_BOX(&up_weight_gradient_out));
  m.impl("down_weight_gradient_out", TORCH_BOX(&down_weight_gradient_out));
  m.impl("bias_gradient_out", TORCH_BOX(&bias_gradient_out));
  m.impl("peer_publish", TORCH_BOX(&peer_publish));
  m.impl("peer_meet", TORCH_BOX(&peer_meet));
  m.impl("peer_tables", TORCH_BOX(&peer_tables));
  m.impl("peer_pull", TORCH_BOX(&peer_pull));
  m.impl("peer_push", TORCH_BOX(&peer_push));
  m.impl("peer_collect", TORCH_BOX(&peer_collect));
  m.impl("peer_push_scores", TORCH_BOX(&peer_push_scores));
  m.impl("peer_forward", TORCH_BOX(&peer_forward));
  m.impl("peer_backward", TORCH_BOX(&peer_backward));
  m.impl("expert_view", TORCH_BOX(&expert_view));
  m.impl("expert_table", TORCH_BOX(&expert_table));
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm));
  m.impl("grouped_mm_out", TORCH_BOX(&grouped_mm_out));
  m.impl("pair_up", TORCH_BOX(&pair_up));
  m.impl("pair_down", TORCH_BOX(&pair_down));
}

}  // namespace
}  // namespace guild::binding

STABLE_TORCH_LIBRARY(guild, m) {
  guild::binding::define_machine(m);
  guild::binding::define_routing(m);
  guild::binding::define_layers(m);
  guild::binding::define_inference(m);
  guild::binding::define_steps(m);
  guild::binding::define_exchange(m);
  guild::binding::define_float8(m);
  guild::binding::define_quantisers(m);
  guild::binding::define_microscaling(m);
}
STABLE_TORCH_LIBRARY_IMPL(guild, CPU, m) {
  guild::binding::implement(m);
  guild::binding::implement_float8(m);
  guild::binding::implement_quantisers(m);
  guild::binding::implement_microscaling(m);
}
STABLE_TORCH_LIBRARY_IMPL(guild, CUDA, m) {
  guild::binding::implement(m);
  guild::binding::implement_float8(m);
  guild::binding::implement_quantisers(m);
  guild::binding::implement_microscaling(m);
}
STABLE_TORCH_LIBRARY_IMPL(guild, CompositeExplicitAutograd, m) {
  m.impl("cuda_built", TORCH_BOX(&guild::binding::cuda_built));
  m.impl("peer_memory_sizes", TORCH_BOX(&guild::binding::peer_memory_sizes));
  m.impl("num_sms", TORCH_BOX(&guild::binding::num_sms));
  m.impl("set_num_sms", TORCH_BOX(&guild::binding::set_num_sms));
  m.impl("cuda_reason", TORCH_BOX(&guild::binding::cuda_reason));
}
