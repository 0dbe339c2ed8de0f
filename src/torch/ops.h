// The functions behind torch.ops.guild; binding.cpp gives their schemas.
//
// Conventions: offsets (E + 1) are int32 row positions; w_gate is given where gate and up are two
// tensors and w_up is up alone; `interleaved` is the order of gate and up in w_up, h, dh and b_up;
// `transposed` weights are (E, in, out); experts_at is int32 (3, E), guild::Weight::expert_at of
// w_up, w_gate and w_down, or of their gradients where these are arguments; without it no weight
// has any. Outputs that are not asked for are empty tensors.
#pragma once
#include <tuple>

#include "guild/router_logits.h"
#include "torch/tensors.h"

namespace guild::binding {

using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors6 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors7 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// ---- routing.cpp, balancing.cpp ----------------------------------------------------------------

// The score of an op's argument, checked.
Score score_of(int64_t score);

// logits (T, E), selection_bias (E), token_mask (T) bool -> scores (T, K), ids (T, K) int32, slopes
// (T, K), or (0, K) for softmax
Tensors3 route(Tensor const& logits, MaybeTensor const& selection_bias,
               MaybeTensor const& token_mask, int64_t top_k, int64_t score, bool renormalize,
               double scale, int64_t groups, int64_t top_groups, double sum_floor,
               int64_t group_score);
// logits (T, E): only where needs_logits(router); the result has the dtype of `like`
Tensor route_backward(Tensor const& dscores, Tensor const& scores, Tensor const& ids,
                      MaybeTensor const& slopes, MaybeTensor const& logits, int64_t experts,
                      int64_t score, bool renormalize, double scale,
                      MaybeTensor const& token_offsets, MaybeTensor const& like, double sum_floor);
// ids (T, K) of route, seed (1) int64 on the device -> scores, ids, slopes (or an empty tensor) by
// slot of the tokens' lists, token_offsets (T + 1)
Tensors4 round_tokens(Tensor const& logits, Tensor const& ids, MaybeTensor const& seed,
                      int64_t score, bool renormalize, double scale, int64_t rounding, int64_t tile,
                      double sum_floor);
// -> shares (sequences, E), squares (sequences), counts (sequences, E) int32
Tensors3 balance_sums(Tensor const& logits, Tensor const& ids, MaybeTensor const& token_mask,
                      int64_t score, int64_t sequences);
Tensor balance_sums_backward(Tensor const& dshares, Tensor const& dsquares, Tensor const& logits,
                             MaybeTensor const& token_mask, int64_t score);
// -> offsets (E + 1), row_token (R), slot_row as ids, row_score (R). Here and below: with
// token_offsets (T + 1), tokens have lists of any length, and (T, K) tensors are (slots) instead.
Tensors4 sort_by_expert(Tensor const& ids, Tensor const& scores, int64_t experts,
                        MaybeTensor const& token_offsets);

// The same, not yet run: running `args` fills the tensors. `scores` and row_score share a type.
struct Sorting {
  Sort args;
  Tensor offsets, row_token, slot_row, row_score, workspace;
};
Sorting sorting(Place const& place, Tensor const& ids, Tensor const& scores, int64_t experts,
                DType scores_dtype, MaybeTensor const& token_offsets);

// A route not yet run, without its logits and outputs.
struct RouteSizes {
  int64_t tokens, experts, top_k;
  DType dtype;  // of the logits and scores
};
struct RouterScalars {
  int64_t score;
  bool renormalize;
  double scale;
  int64_t groups, top_groups;
  double sum_floor;
  int64_t group_score;
};
Route route_of(Place const& place, RouteSizes const& sizes, MaybeTensor const& selection_bias,
               MaybeTensor const& token_mask, RouterScalars const& router);

// The same with new tensors for its outputs.
struct Routed {
  Route args;
  Tensor scores, ids, slopes;

  Routed(Place const& place, RouteSizes const& sizes, MaybeTensor const& selection_bias,
         MaybeTensor const& token_mask, RouterScalars const& router);
};

// ---- logits.cpp ---------------------------------------------------------------------------------

// The router's product of x (T, H) and weight (E, H), not yet run; the tensors, which are copied if
// the product cannot read their layout, must outlive it.
class RouterProduct {
 public:
  RouterProduct(Place const& place, Tensor const& x, Tensor const& weight);

  RouteSizes sizes(int64_t top_k) const;
  int64_t workspace_bytes() const;
  // logits in a new tensor, float32, or float64
  Tensor logits(Place const& place);
  // route() then also writes sigmoid(x gate^T), (T) in float32, to `score`; of 16-bit operands.
  void add_gate(RouterProduct const& gate, void* score, void* workspace);
  // Routes by the logits, which are not kept, into the outputs of `route`.
  void route(Place const& place, Route const& route, void* workspace);
  // The arguments, for kernels on a GPU that run the product themselves; null where PyTorch does.
  RouterLogits const* args(Place const& place, void* workspace);

 private:
  Tensor x_, weight_;
  RouterLogits args_;
  bool by_torch_;
};

// x (T, H), weight (E, H) -> (T, E) in float32, or float64
Tensor router_logits(Tensor const& x, Tensor const& weight);
// The same and route, of logits that are not kept
Tensors3 route_tokens(Tensor const& x, Tensor const& weight, MaybeTensor const& selection_bias,
                      MaybeTensor const& token_mask, int64_t top_k, int64_t score, bool renormalize,
                      double scale, int64_t groups, int64_t top_groups, double sum_floor,
                      int64_t group_score);

// ---- layer.cpp ----------------------------------------------------------------------------------

// residual (T, H) -> o (T, H), h (R, W) or empty, offsets, row_token, slot_row, row_score
Tensors6 moe_forward(Tensor const& x, Tensor const& ids, Tensor const& scores,
                     MaybeTensor const& token_offsets, MaybeTensor const& residual,
                     Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                     MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                     double alpha, double limit, double up_offset, bool clamp_after,
                     bool interleaved, bool transposed, bool keep, MaybeTensor const& experts_at);
// -> dx, dscores, dw_up, dw_gate, dw_down, db_up, db_down; wanted: bits of Wanted
Tensors7 moe_backward(Tensor const& dout, Tensor const& x, Tensor const& h, Tensor const& offsets,
                      Tensor const& row_token, Tensor const& slot_row, Tensor const& row_score,
                      MaybeTensor const& token_offsets, Tensor const& w_up,
                      MaybeTensor const& w_gate, Tensor const& w_down, MaybeTensor const& b_down,
                      int64_t kind, bool gated, double alpha, double limit, double up_offset,
                      bool clamp_after, bool interleaved, bool transposed, int64_t wanted,
                      MaybeTensor const& experts_at);
// Rows already sorted: x (R, H) -> o (R, H), zero past offsets[E], and h.
Tensors2 experts_forward(Tensor const& x, Tensor const& offsets, Tensor const& w_up,
                         MaybeTensor const& w_gate, Tensor const& w_down, MaybeTensor const& b_up,
                         MaybeTensor const& b_down, int64_t kind, bool gated, double alpha,
                         double limit, double up_offset, bool clamp_after, bool interleaved,
                         bool transposed, bool keep, MaybeTensor const& experts_at);
// The same into out (R, H), keeping nothing.
void experts_forward_out(Tensor const& x, Tensor const& offsets, Tensor const& w_up,
                         MaybeTensor const& w_gate, Tensor const& w_down, MaybeTensor const& b_up,
                         MaybeTensor const& b_down, int64_t kind, bool gated, double alpha,
                         double limit, double up_offset, bool clamp_after, bool interleaved,
                         bool transposed, Tensor& out, MaybeTensor const& experts_at);
// -> dx (zero past offsets[E]), dw_up, dw_gate, dw_down, db_up, db_down
Tensors6 experts_backward(Tensor const& dout, Tensor const& x, Tensor const& h,
                          Tensor const& offsets, Tensor const& w_up, MaybeTensor const& w_gate,
                          Tensor const& w_down, int64_t kind, bool gated, double alpha,
                          double limit, double up_offset, bool clamp_after, bool interleaved,
                          bool transposed, int64_t wanted, MaybeTensor const& experts_at);
// Backward without the weights' gradients, of tokens or, without row_token, slot_row and row_score,
// of sorted rows -> dx, dscores, and the operands of the weights' gradients: dh (R, W), a_scaled
// (R, I). db_up (E, W) and db_down (E, H), of one type, are written, or added to.
Tensors4 data_gradients(Tensor const& dout, Tensor const& h, Tensor const& offsets,
                        MaybeTensor const& row_token, MaybeTensor const& slot_row,
                        MaybeTensor const& row_score, MaybeTensor const& token_offsets,
                        Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                        MaybeTensor const& b_down, int64_t kind, bool gated, double alpha,
                        double limit, double up_offset, bool clamp_after, bool interleaved,
                        bool transposed, int64_t wanted, MaybeTensor& db_up, MaybeTensor& db_down,
                        bool accumulate, MaybeTensor const& experts_at);

// ---- inference.cpp ------------------------------------------------------------------------------

// moe_forward into out (T, H), keeping nothing -> offsets
Tensor moe_forward_out(Tensor const& x, Tensor const& ids, Tensor const& scores,
                       MaybeTensor const& token_offsets, MaybeTensor const& residual,
                       Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                       double alpha, double limit, double up_offset, bool clamp_after,
                       bool interleaved, bool transposed, Tensor& out,
                       MaybeTensor const& experts_at);
// Router product, route and moe_forward_out: x (T, H), router (E, H) -> offsets
Tensor moe_layer_out(Tensor const& x, Tensor const& router, MaybeTensor const& selection_bias,
                     MaybeTensor const& token_mask, int64_t top_k, int64_t score, bool renormalize,
                     double scale, int64_t groups, int64_t top_groups, double sum_floor,
                     int64_t group_score, MaybeTensor const& residual, Tensor const& w_up,
                     Tensor const& w_down, MaybeTensor const& b_up, MaybeTensor const& b_down,
                     int64_t kind, bool gated, double alpha, double limit, double up_offset,
                     bool clamp_after, bool interleaved, bool transposed, Tensor& out);
// The same two into a new tensor -> out (T, H), offsets, with fewer arguments: ids are (T, K), w_up
// is one tensor, no token is masked. Instead of a residual, infer_layer can take the weights of
// shared experts, which it runs with the layer's activation and order: (W, H), or (2 W, H) with a
// gate, and (H, W). Their results are multiplied by shared_scale, (T, 1) in the scores' dtype, or
// by sigmoid(x shared_gate^T) of 16-bit operands with shared_gate (1, H). settings, float64 on the
// CPU: kind, gated, alpha, limit, up_offset, clamp_after, interleaved, transposed; for infer_layer
// also top_k, score, renormalize, scale, groups, top_groups, sum_floor, group_score.
Tensors2 infer_experts(Tensor const& x, Tensor const& ids, Tensor const& scores,
                       MaybeTensor const& residual, Tensor const& w_up, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, Tensor const& settings);
Tensors2 infer_layer(Tensor const& x, Tensor const& router, MaybeTensor const& selection_bias,
                     MaybeTensor const& residual, MaybeTensor const& shared_up,
                     MaybeTensor const& shared_down, MaybeTensor const& shared_scale,
                     MaybeTensor const& shared_gate, Tensor const& w_up, Tensor const& w_down,
                     MaybeTensor const& b_up, MaybeTensor const& b_down, Tensor const& settings);
// Only shared experts; settings as for infer_experts, weights never transposed.
Tensor infer_shared(Tensor const& x, Tensor const& w_up, Tensor const& w_down,
                    Tensor const& settings);

// ---- steps.cpp: one step of the layer each ------------------------------------------------------

// low_rank_t (R, rank) and low_rank_b (E, out, rank), both or none: a term of the product, whose
// columns are out.

// -> a (R, I), h (R, W) or empty
Tensors2 up_projection(Tensor const& x, Tensor const& offsets, MaybeTensor const& row_token,
                       Tensor const& w_up, MaybeTensor const& w_gate, MaybeTensor const& b_up,
                       int64_t kind, bool gated, double alpha, double limit, double up_offset,
                       bool clamp_after, bool interleaved, bool transposed, bool keep,
                       MaybeTensor const& low_rank_t, MaybeTensor const& low_rank_b,
                       MaybeTensor const& experts_at);
Tensor down_projection(Tensor const& a, Tensor const& offsets, Tensor const& w_down,
                       MaybeTensor const& b_down, bool transposed, MaybeTensor const& low_rank_t,
                       MaybeTensor const& low_rank_b, MaybeTensor const& experts_at);
// y (R, H), slot_row (T, K), residual (T, H) -> (T, H). dlogits (T, E), ids (T, K) and router (E,
// H) for the router's part of a gradient: all three or none.
Tensor combine(Tensor const& y, Tensor const& slot_row, MaybeTensor const& slot_score,
               MaybeTensor const& token_offsets, MaybeTensor const& residual,
               MaybeTensor const& dlogits, MaybeTensor const& ids, MaybeTensor const& router);
// -> dh (R, W), a_scaled (R, I), score_parts (R, parts); db_up (E, W) and db_down (E, H), of one
// type, are written, or added to
Tensors3 down_gradient(Tensor const& dout, Tensor const& h, Tensor const& offsets,
                       MaybeTensor const& row_token, MaybeTensor const& row_score,
                       Tensor const& w_down, int64_t kind, bool gated, double alpha, double limit,
                       double up_offset, bool clamp_after, bool interleaved, bool transposed,
                       MaybeTensor& db_up, MaybeTensor& db_down, bool accumulate,
                       MaybeTensor const& low_rank_t, MaybeTensor const& low_rank_b,
                       MaybeTensor const& experts_at);
// -> dscores (T, K)
Tensor score_gradient(Tensor const& score_parts, Tensor const& slot_row, Tensor const& offsets,
                      Tensor const& dout, MaybeTensor const& b_down, int64_t intermediate,
                      MaybeTensor const& token_offsets);
Tensor up_gradient(Tensor const& dh, Tensor const& offsets, Tensor const& w_up,
                   MaybeTensor const& w_gate, bool gated, bool interleaved, bool transposed,
                   MaybeTensor const& low_rank_t, MaybeTensor const& low_rank_b,
                   MaybeTensor const& experts_at);

// ---- weight_gradients.cpp: written into, or added to, the caller's tensors ----------------------

// Writes those of dw_up (and dw_gate where gate and up are apart) and dw_down that are given, in
// one type: the rest of backward after data_gradients.
void weight_gradients_out(Tensor const& x, Tensor const& dout, Tensor const& dh,
                          Tensor const& a_scaled, Tensor const& offsets,
                          MaybeTensor const& row_token, MaybeTensor& dw_up, MaybeTensor& dw_gate,
                          MaybeTensor& dw_down, bool gated, bool interleaved, bool transposed,
                          bool accumulate, MaybeTensor const& experts_at);
// The two of them as steps of their own.
void up_weight_gradient_out(Tensor const& x, Tensor const& dh, Tensor const& offsets,
                            MaybeTensor const& row_token, Tensor& dw_up, MaybeTensor& dw_gate,
                            bool gated, bool interleaved, bool transposed, bool accumulate,
                            MaybeTensor const& experts_at);
void down_weight_gradient_out(Tensor const& dout, Tensor const& a, Tensor const& offsets,
                              MaybeTensor const& row_token, Tensor& dw_down, bool transposed,
                              bool accumulate, MaybeTensor const& experts_at);
void bias_gradient_out(Tensor const& m, Tensor const& offsets, MaybeTensor const& row_token,
                       MaybeTensor const& row_score, Tensor& db, bool accumulate);

// ---- exchange.cpp: see guild/exchange.h ---------------------------------------------------------

// -> bytes of a rank's memory, and the offsets of returned rows and scores in it
std::tuple<int64_t, int64_t, int64_t> peer_memory_sizes(int64_t ranks, std::vector<int64_t> memory);
// rows (T, H), ids (T, K) int32 and scores (T, K), both or none -> token_row (T, ranks) or (0,
// ranks)
Tensor peer_publish(Tensor const& peers, std::vector<int64_t> memory, Tensor const& rows,
                    MaybeTensor const& ids, MaybeTensor const& scores, int64_t experts);
// report (5) int64 on the host, pinned; needed (1) int32
void peer_meet(Tensor const& peers, std::vector<int64_t> memory, bool published, double seconds,
               std::vector<int64_t> facts, Tensor& report, MaybeTensor const& needed,
               int64_t capacity);
// -> ids, scores (ranks * Tm, K), tokens (ranks); like: of the layer's dtype
Tensors3 peer_tables(Tensor const& peers, std::vector<int64_t> memory, int64_t top_k,
                     int64_t experts, Tensor const& like);
// ids (ranks * Tm, K), like (T, H) -> (ranks * Tm, H)
Tensor peer_pull(Tensor const& peers, std::vector<int64_t> memory, Tensor const& ids,
                 Tensor const& like);
void peer_push(Tensor const& peers, std::vector<int64_t> memory, Tensor const& y,
               Tensor const& row_of, MaybeTensor const& scores, MaybeTensor const& token_offsets,
               Tensor const& tokens, bool by_slot);
// token_row (T, ranks), like: of dtype and width, residual (T, H) -> (T, H)
Tensor peer_collect(Tensor const& peers, std::vector<int64_t> memory, Tensor const& token_row,
                    Tensor const& like, MaybeTensor const& residual);
void peer_push_scores(Tensor const& peers, std::vector<int64_t> memory, Tensor const& ids,
                      Tensor const& scores);

// ---- peer_layer.cpp: see guild/peer_layer.h -----------------------------------------------------

// o (T, H); what backward needs: rows (ranks * Tm, H), h (R, W) or (0, W), offsets, row_token,
// slot_row (ranks * Tm, K), row_score, token_row (T, ranks), by_slot (ranks * Tm, K) and counts
// (ranks) of Tables; offsets (E of all ranks + 1) of this rank's tokens
using PeerForwardTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                      Tensor, Tensor, Tensor, Tensor>;
// facts of both barriers, as peer_meet takes them; streams: link and side of PeerStreams, or none.
// ids (T, K) int32 among all ranks' `experts`; weights are this rank's.
PeerForwardTensors peer_forward(Tensor const& peers, std::vector<int64_t> memory, double seconds,
                                std::vector<int64_t> facts, std::vector<int64_t> facts_returned,
                                Tensor& report, std::vector<int64_t> streams, Tensor const& x,
                                Tensor const& ids, Tensor const& scores, int64_t experts,
                                MaybeTensor const& residual, Tensor const& w_up,
                                MaybeTensor const& w_gate, Tensor const& w_down,
                                MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind,
                                bool gated, double alpha, double limit, double up_offset,
                                bool clamp_after, bool interleaved, bool transposed, bool keep);
// -> dx (T, H), dscores (T, K), dw_up, dw_gate, dw_down, db_up, db_down. wanted: as in
// moe_backward, with WANT_ROWS for dx.
Tensors7 peer_backward(Tensor const& peers, std::vector<int64_t> memory, double seconds,
                       std::vector<int64_t> facts, std::vector<int64_t> facts_returned,
                       Tensor& report, std::vector<int64_t> streams, Tensor const& dout,
                       Tensor const& rows, Tensor const& h, Tensor const& offsets,
                       Tensor const& row_token, Tensor const& slot_row, Tensor const& row_score,
                       Tensor const& token_row, Tensor const& by_slot, Tensor const& counts,
                       Tensor const& w_up, MaybeTensor const& w_gate, Tensor const& w_down,
                       MaybeTensor const& b_up, MaybeTensor const& b_down, int64_t kind, bool gated,
                       double alpha, double limit, double up_offset, bool clamp_after,
                       bool interleaved, bool transposed, int64_t wanted);

// ---- products.cpp -------------------------------------------------------------------------------

// A view (E, rows, columns) of the experts' matrices, which are shaped like `first` and lie
// `stride` elements apart from it on; the caller keeps that memory alive.
Tensor expert_view(Tensor const& first, int64_t experts, int64_t stride);
// Copies indices, int32 on the CPU, to the device of `like`.
Tensor expert_table(Tensor const& like, Tensor const& indices);

// The four cases of torch._grouped_mm; offs (E) are END positions. a_at, b_at, out_at: int32 (1,
// E), guild::GroupedGemm::Operand::group_at of each.
Tensor grouped_mm(Tensor const& a, Tensor const& b, MaybeTensor const& offs,
                  MaybeTensor const& bias, bool float_out, MaybeTensor const& a_at,
                  MaybeTensor const& b_at);
void grouped_mm_out(Tensor const& a, Tensor const& b, MaybeTensor const& offs,
                    MaybeTensor const& bias, Tensor& out, bool accumulate, MaybeTensor const& a_at,
                    MaybeTensor const& b_at, MaybeTensor const& out_at);
// The fused pair on sorted rows, weights (E, in, out): x -> a (zero past offsets[E]) and h.
Tensors2 pair_up(Tensor const& x, Tensor const& w_up, Tensor const& offsets,
                 MaybeTensor const& bias, int64_t kind, bool gated, double alpha, double limit,
                 double up_offset, bool clamp_after, bool interleaved);
// a W + bias, zero past offsets[E]. aux and the activation are only for its gradient: with aux the
// gradient goes to aux instead of a.
Tensor pair_down(Tensor const& a, MaybeTensor const& aux, Tensor const& w_down,
                 Tensor const& offsets, MaybeTensor const& bias, int64_t kind, bool gated,
                 double alpha, double limit, double up_offset, bool clamp_after, bool interleaved);

// ---- float8.cpp ---------------------------------------------------------------------------------

// Codes are passed as uint8; formats and scales are the values of Float8 and ScaleKind.

// a (M, K), a_scales (M, ceil(K / 128)), b (E, N, K), b_scales (E, ceil(N / 128), ceil(K / 128)),
// offs (E) ends -> out (M, N)
void scaled_grouped_mm_out(Tensor const& a, Tensor const& a_scales, int64_t a_format,
                           Tensor const& b, Tensor const& b_scales, int64_t b_format,
                           Tensor const& offs, Tensor& out, int64_t halves,
                           MaybeTensor const& bias);

// x (T or R, H) codes, w_up, w_gate (E, I, H) codes, H contiguous -> a (R, I) codes; h (R, W) in
// the dtype of b_up and h, or h_codes (R, W), gate before up; scales as in guild/float8.h
void scaled_up_out(Tensor const& x, Tensor const& x_scales, int64_t x_format, Tensor const& offsets,
                   MaybeTensor const& row_token, Tensor const& w_up, Tensor const& up_scales,
                   MaybeTensor const& w_gate, MaybeTensor const& gate_scales,
                   MaybeTensor const& b_up, int64_t kind, bool gated, double alpha, double limit,
                   double up_offset, bool clamp_after, bool interleaved, int64_t format,
                   int64_t scale, MaybeTensor& h, MaybeTensor& h_codes, MaybeTensor& h_scales,
                   Tensor& a, Tensor& a_scales);
// dout (T or R, H) codes, w_down (E, H, I) codes, H contiguous; h as above -> dh_codes (R, W), gate
// before up; dh (R, W), a_scaled (R, I) in one dtype, that of h where given; score_parts float32;
// dh_chunks (slots, W, 128), a_chunks (slots, I, 128), scales as in guild/float8.h
void scaled_down_gradient_out(Tensor const& dout, Tensor const& dout_scales, int64_t dout_format,
                              Tensor const& offsets, MaybeTensor const& row_token,
                              MaybeTensor const& row_score, Tensor const& w_down,
                              Tensor const& w_scales, MaybeTensor const& h,
                              MaybeTensor const& h_codes, MaybeTensor const& h_scales, int64_t kind,
                              bool gated, double alpha, double limit, double up_offset,
                              bool clamp_after, bool interleaved, int64_t format, int64_t scale,
                              Tensor& dh_codes, Tensor& dh_scales, MaybeTensor& dh,
                              MaybeTensor& a_scaled, MaybeTensor& score_parts,
                              MaybeTensor& dh_chunks, MaybeTensor& dh_chunk_scales,
                              MaybeTensor& a_chunks, MaybeTensor& a_chunk_scales);

}  // namespace guild::binding
