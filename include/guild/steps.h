// The arguments of every step of a Mixture-of-Experts layer, forward and backward.
//
// guild::cpu::f(args) and guild::cuda::f(args, queue) take the same structs. Symbols: T tokens,
// hidden size H, intermediate size I, E experts, K choices per token, R = sizes.rows() rows (T * K
// by default), and W = 2I with a gate, I without. Every matrix has the layer's dtype and R rows (by
// row) or T rows (by token). Matrix products accumulate in fp32 (float64 in float64). A pointer may
// be null where its comment says what null means. Rows before offsets[0] and those at or past
// offsets[E] are neither used nor written. Experts without rows get zero gradients. A row_token
// outside [0, T) stands for a row of zeros. Outputs must not overlap inputs or each other, unless a
// comment allows it.
//
// Algorithm: SonicMoE, arXiv:2512.14080, section 3 (backward from X, H and the routing alone).
#pragma once
#include "guild/routing.h"
#include "guild/types.h"

namespace guild {

// A low-rank (LoRA) term of a product: adds t b^T, with t (R, rank) and b (E, out, rank), where
// `out` counts the product's columns. On CUDA the rank is a multiple of 8, and b is contiguous
// along `out` if the product's weight is, and along `rank` if the weight is contiguous along `in`.
template <class W>
struct LowRankTerm {
  ConstRows t = {};
  W b = {};
  int64_t rank = 0;  // 0: no term
};

// ---- forward ------------------------------------------------------------------------------------

// H = X[row_token] W1^T + b1;  A = activation(H)
struct UpProjection {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;
  Activation activation = {};
  GateUp order = GateUp::concatenated;       // of h and bias
  Routing routing = {};                      // uses offsets, row_token
  ConstRows x = {};                          // (T, H), or (R, H) where row_token is null
  ConstUpWeight w_up = {};                   // (E, I, H) twice
  ConstRows bias = {};                       // (E, W); null data: none
  Rows h = {};                               // (R, W) out; null data: not kept (inference)
  Rows a = {};                               // (R, I) out
  LowRankTerm<ConstUpWeight> low_rank = {};  // of H; b: (E, I, rank) twice
  // Rows that h has memory for; -1: R. If the experts have more, the contents of h are undefined.
  int64_t h_rows = -1;
  // Whether the previous step on the queue was the pull() of x (guild/exchange.h). w_up and the
  // offsets may then be prefetched while it still runs, which hides latency when there are few
  // rows.
  bool after_pull = false;
};

// Y = A W2^T + b2
struct DownProjection {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;
  Routing routing = {};                    // uses offsets
  ConstRows a = {};                        // (R, I)
  ConstWeight w_down = {};                 // (E, H, I)
  ConstRows bias = {};                     // (E, H); null data: none
  Rows y = {};                             // (R, H) out
  LowRankTerm<ConstWeight> low_rank = {};  // of Y; b: (E, H, rank)
  // Whether the previous step on the queue was an up projection with the same offsets. w_down may
  // then be prefetched while it still runs, which hides latency when there are few rows.
  bool after_up = false;
};

// sum over k of dlogits[t, ids[t, k]] * weight[ids[t, k]]: the router's part of dX if only the
// chosen experts' logits have gradients: with sigmoid, sqrt_softplus, and softmax with renormalize
// and no sum_floor.
struct RouterPart {
  ConstRows dlogits = {};        // (T, E); null data: no such part
  int32_t const* ids = nullptr;  // (T, K) like slot_row; ids outside [0, E) add nothing
  ConstRows weight = {};         // (E, H)
};

// O[t] = residual[t] + sum over k of slot_score[t, k] * Y[slot_row[t, k]] + router part, in fp32 in
// a fixed order; slots at -1 add nothing. Without slot_score it is the plain sum: the gradient of
// the gather.
struct Combine {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;
  Routing routing = {};     // uses slot_row, slot_score
  ConstRows y = {};         // (R, H)
  Rows o = {};              // (T, H) out
  ConstRows residual = {};  // (T, H), may be o itself; null data: none
  RouterPart router = {};   // only without slot_score
  // (T), score dtype: multiplies the residual; the product is rounded to dtype. Null: 1.
  void const* residual_scale = nullptr;
};

// ---- backward -----------------------------------------------------------------------------------

// With g = dO[row_token] W2 (not scaled), s = row_score and A recomputed from H:
//   dH = d activation(s * g, H);   A' = s * A;   score_parts = partial sums of <g, A> over I
// and, over the rows of each expert, the gradients of the biases, as in BiasGradient:
//   db1 = sum of dH;   db2 = sum of s * dO[row_token]
struct DownGradient {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;
  Activation activation = {};
  GateUp order = GateUp::concatenated;  // of h and dh
  Routing routing = {};                 // uses offsets, row_token, row_score
  ConstRows dout = {};                  // (T, H), or (R, H) where row_token is null
  ConstWeight w_down = {};              // (E, H, I)
  ConstRows h = {};                     // (R, W)
  Rows dh = {};                         // (R, W) out
  Rows a_scaled = {};                   // (R, I) out; null data: not wanted
  void* score_parts = nullptr;          // (R, score_parts(sizes)) out, score dtype; null: no dS
  Rows db_up = {};                      // (E, W) out, in dh's order; null data: not wanted
  Rows db_down = {};                    // (E, H) out; null data: not wanted
  DType db_dtype = DType::bfloat16;     // dtype or float32
  bool accumulate = false;              // add to db_up and db_down instead of writing them
  void* workspace = nullptr;  // down_gradient_workspace_bytes(); null where no db is wanted
  LowRankTerm<ConstWeight> low_rank = {};  // of g; b: (E, I, rank). Not together with db_down
  // Recomputed H, read instead of h if *needed > h_rows. It, or h if it has R rows, may alias dh:
  // each element of H is read before that of dH is stored.
  ConstRows h_again = {};           // (R, W); null data: h has R rows
  int64_t h_rows = -1;              // as in UpProjection; -1 without h_again
  int32_t const* needed = nullptr;  // (1) of all experts: offsets + E; null without h_again
};

// dscores[t, k] = sum over parts of score_parts[r] + <dO[t], b2[e of r]>, r = slot_row[t, k];
// zero for slots at -1. Sums in a fixed order.
struct ScoreGradient {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;      // of dout and bias
  Routing routing = {};               // uses slot_row, and offsets where there is a bias
  void const* score_parts = nullptr;  // (R, score_parts(sizes))
  ConstRows dout = {};                // (T, H); read only where there is a bias
  ConstRows bias = {};                // (E, H) b2; null data: none
  void* dscores = nullptr;            // (T, K) out
};

// dX~ = dH W1, by row. Combine without slot_score sums it to dX.
struct UpGradient {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;
  bool gated = true;
  GateUp order = GateUp::concatenated;     // of dh
  Routing routing = {};                    // uses offsets
  ConstRows dh = {};                       // (R, W)
  ConstUpWeight w_up = {};                 // (E, I, H) twice
  Rows dx = {};                            // (R, H) out
  LowRankTerm<ConstWeight> low_rank = {};  // of dX~; b: (E, H, rank)
};

// Dynamic scheduling of the weight gradients, whose sums run over an expert's rows and so differ in
// length: thread blocks claim tiles from a counter, experts with the most rows first. Fill it with
// cuda::schedule_weight_gradients; it then serves one call of each of the two steps below. Null:
// static scheduling in the experts' order, with the same results.
struct WeightSchedule {
  static constexpr int kCounters = 3;
  int32_t* order = nullptr;  // (E) experts by decreasing number of rows
  int32_t* taken = nullptr;  // (kCounters) tiles claimed so far: of dW2, of dW1's gate, of its up
};

// dW1[e] = dH[rows of e]^T X[row_token of them]: (E, I, H) twice, written with the given strides.
struct UpWeightGradient {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;     // of x and dh
  DType dw_dtype = DType::bfloat16;  // dtype or float32
  bool accumulate = false;           // add to dw instead of writing it
  bool gated = true;
  GateUp order = GateUp::concatenated;  // of dh
  Routing routing = {};                 // uses offsets, row_token
  ConstRows x = {};                     // (T, H), or (R, H) where row_token is null
  ConstRows dh = {};                    // (R, W)
  UpWeight dw = {};                     // (E, I, H) twice, out
  WeightSchedule schedule = {};
};

// dW2[e] = dO[row_token of e]^T A'[rows of e]: (E, H, I)
struct DownWeightGradient {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;     // of dout and a
  DType dw_dtype = DType::bfloat16;  // dtype or float32
  bool accumulate = false;
  Routing routing = {};  // uses offsets, row_token
  ConstRows dout = {};   // (T, H), or (R, H) where row_token is null
  ConstRows a = {};      // (R, I): A' = s * A
  Weight dw = {};        // (E, H, I) out
  WeightSchedule schedule = {};
};

// db[e] = sum over rows r of e of row_score[r] * M[r], or * M[row_token[r]] where gathered.
// db1: M = dH, width W, no score, not gathered. db2: M = dO, width H, scores, gathered.
struct BiasGradient {
  int64_t rows = 0, width = 0, experts = 0;  // rows: R
  DType dtype = DType::bfloat16;             // of m
  DType db_dtype = DType::bfloat16;          // dtype or float32
  bool accumulate = false;
  Routing routing = {};  // uses offsets; row_token and row_score unless null
  ConstRows m = {};      // (rows or tokens, width)
  Rows db = {};          // (E, width) out
  int64_t tokens = -1;   // rows of m where gathered
};

// ---- level 1: the bare grouped product ----------------------------------------------------------

// D = A B + bias in the four cases of torch._grouped_mm. As there, offsets are int32 END positions
// (E): group e spans [e ? offsets[e - 1] : 0, offsets[e]). Any strides are allowed, in elements.
// Rows and columns outside all groups, and groups with an empty sum over K, are set to zero without
// the bias; with accumulate they are left unchanged.
struct GroupedGemm {
  enum class Ragged : int {
    rows,     // A (M, K)    B (E, K, N)  D (M, N)      groups split M
    inner,    // A (M, K)    B (K, N)     D (E, M, N)   groups split K
    columns,  // A (E, M, K) B (K, N)     D (M, N)      groups split N
    none,     // A (E, M, K) B (E, K, N)  D (E, M, N)
  };
  struct Operand {  // element (e, i, j) at data[e * group_stride + i * row_stride + j * col_stride]
    void* data = nullptr;
    int64_t group_stride = 0, row_stride = 0, col_stride = 1;
    int32_t const* group_at = nullptr;  // (E) used in place of e, like Weight::expert_at; null: e
  };
  Ragged ragged = Ragged::rows;
  int64_t m = 0, n = 0, k = 0, groups = 0;  // m, n, k: totals, ragged dimension included
  DType dtype = DType::bfloat16;            // of a, b and bias
  DType out_dtype = DType::bfloat16;        // dtype or float32
  bool accumulate = false;                  // D += instead of D =
  int32_t const* offsets = nullptr;         // (E) end of each group; null for Ragged::none
  Operand a = {}, b = {}, d = {};           // a and b are only read
  ConstRows bias = {};                      // (E, N), Ragged::columns: (E, M); null data: none
};

// ---- composites ---------------------------------------------------------------------------------

// Sort (if given), up projection, down projection, combine. Where routing has no slots (row_token,
// slot_row and token_offsets null), x and o have R rows, in sorted order, and scores are not used.
struct MoeForward {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;
  Activation activation = {};
  GateUp order = GateUp::concatenated;
  Routing routing = {};
  ConstRows x = {};                  // (T, H), or (R, H) without slots
  ConstUpWeight w_up = {};           // (E, I, H) twice
  ConstWeight w_down = {};           // (E, H, I)
  ConstRows b_up = {}, b_down = {};  // (E, W), (E, H); null data: none
  Rows h = {};                       // (R, W) out, kept for backward; null data: inference
  Rows o = {};                       // (T, H), or (R, H) without slots, out
  void* workspace = nullptr;         // moe_forward_workspace_bytes()
  ConstRows residual = {};  // (T, H) of combine; null data: none, as it must be if o has R rows
  // A sort to run first, whose outputs are routing's arrays. On CUDA it is fused into the products
  // if there are few slots. Null: routing is already filled.
  Sort const* sort = nullptr;
  void const* residual_scale = nullptr;  // (T), of combine; null: 1
};

// Down gradient with db1 and db2, score gradient, dW2, dW1, up gradient, combine gradient. Outputs
// with null data are not computed. To compute the weight gradients later (MoeWeightGradients), set
// dh and a_scaled and leave dw_up and dw_down null. Backward reads row_score, forward slot_score:
// for every slot i with a row, row_score[slot_row[i]] must equal slot_score[i]. Where routing has
// no slots, dout, x and dx have R rows; with row_score, dout is then the gradient of
// row_score[r] * o[r], a product that forward leaves to its caller.
struct MoeBackward {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;
  DType dw_dtype = DType::bfloat16;  // of dw_up, dw_down and the bias gradients
  bool accumulate = false;           // add to the weight and bias gradients
  Activation activation = {};
  GateUp order = GateUp::concatenated;
  Routing routing = {};
  ConstRows dout = {}, x = {}, h = {};  // (T, H), (T, H), (R, W)
  ConstUpWeight w_up = {};
  ConstWeight w_down = {};
  ConstRows b_down = {};          // (E, H), for dscores; null data: none
  Rows dx = {};                   // (T, H) out
  UpWeight dw_up = {};            // out
  Weight dw_down = {};            // out
  Rows db_up = {}, db_down = {};  // (E, W), (E, H) out
  void* dscores = nullptr;        // (T, K) out
  void* workspace = nullptr;      // moe_backward_workspace_bytes()
  Rows dx_rows = {};              // (R, H) out, instead of dx: the caller runs the Combine
  // (R, W), (R, I) out: dH and A', the operands of the weight gradients. Both or neither; null
  // data: they are in the workspace.
  Rows dh = {}, a_scaled = {};
};

// The weight gradients that MoeBackward left out: their schedule, dW2 and dW1. Outputs with null
// data are not computed; their operands are not read.
struct MoeWeightGradients {
  Sizes sizes = {};
  DType dtype = DType::bfloat16;     // of the operands
  DType dw_dtype = DType::bfloat16;  // dtype or float32
  bool accumulate = false;           // add to dw_up and dw_down instead of writing them
  bool gated = true;
  GateUp order = GateUp::concatenated;  // of dh
  Routing routing = {};                 // uses offsets, row_token
  ConstRows x = {}, dout = {};          // (T, H), or (R, H) where row_token is null
  ConstRows dh = {}, a_scaled = {};     // (R, W), (R, I), as backward left them
  UpWeight dw_up = {};                  // (E, I, H) twice, out
  Weight dw_down = {};                  // (E, H, I) out
  void* workspace = nullptr;            // moe_weight_gradients_workspace_bytes()
};

// Sizes in bytes of the workspaces above, which must be 16-byte aligned; the same for both
// backends. Tokens, slots and rows may be 0. Negative sizes, sizes above a step's limits and
// products that overflow int64_t throw Error.
int64_t sort_workspace_bytes(int64_t tokens, int64_t experts, int64_t top_k);
int64_t rounding_workspace_bytes(int64_t tokens, int64_t experts);
int64_t balance_workspace_bytes(int64_t tokens, int64_t experts, int64_t sequences);
int64_t down_gradient_workspace_bytes(Sizes const& sizes, bool gated);
int64_t moe_forward_workspace_bytes(Sizes const& sizes, DType dtype);
// combines: whether backward sums rows to dx, that is, dx is given and routing has slots. biases:
// whether bias gradients are wanted. keeps: whether the caller provides dh and a_scaled.
int64_t moe_backward_workspace_bytes(Sizes const& sizes, DType dtype, bool gated,
                                     bool combines = true, bool biases = true, bool keeps = false);
int64_t moe_weight_gradients_workspace_bytes(Sizes const& sizes);

// The most slots that rounding can produce, which is the length of its lists.
int64_t rounded_slots(int64_t tokens, int64_t experts, int64_t top_k, Rounding rounding,
                      int64_t tile);

// Number of partial sums of dS per row, one for each column tile of the down gradient. The score
// gradient adds them up.
int64_t score_parts(Sizes const& sizes);

}  // namespace guild
