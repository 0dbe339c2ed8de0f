// The arguments of the steps that choose experts: the router, its gradient, the sort by expert,
// token rounding and the sums for balancing. Sizes and null as in steps.h.
#pragma once
#include "guild/types.h"

namespace guild {

enum class Score : int { softmax, sigmoid, sqrt_softplus };

// What a group of experts is ranked by: the sum of its two largest keys (DeepSeek-V3,
// arXiv:2412.19437, section 2.1.2), or its largest key (DeepSeek-V2, arXiv:2405.04434, section
// 2.2.2).
enum class GroupScore : int { top2_sum, max };

// What a router does with the logits of one token.
//
// p is softmax over all experts, sigmoid of each, or sqrt(log(1 + exp(logit))) of each
// (DeepSeek-V4).
//
// Selection: the K largest p + selection_bias; ties go to the smaller id, NaN ranks below every
// number. Without a bias and without top2_sum over groups, experts are ranked by their logits: the
// same order, but without ties from rounding p. With groups (equal, consecutive ranges of experts),
// only experts of the top_groups best groups are chosen.
//
// Weights: p of the chosen without the bias, divided by max(their sum, sum_floor) if renormalize,
// times scale. softmax + renormalize equals top-k followed by softmax over the chosen.
//
// With softmax, one NaN logit makes all weights NaN; with the other scores, a chosen NaN makes its
// own weight NaN, and with renormalize all weights. If p of all chosen experts is 0, sigmoid and
// sqrt_softplus give weights of 0. With renormalize and no sum_floor that happens only for logits
// of -infinity, otherwise also if p underflows in dtype. Other infinities follow from the formulas.
struct Router {
  Score score = Score::softmax;
  bool renormalize = true;
  double scale = 1;    // 0 or in float32's normal range, as sum_floor
  int groups = 1;      // divides E; at most 32
  int top_groups = 1;  // groups to choose from; together they have at least K experts
  GroupScore group_score = GroupScore::top2_sum;
  double sum_floor = 0;  // only with renormalize (ERNIE 4.5: 1e-12)
};

// Whether an expert's p depends on its own logit alone. Route can then write slopes.
constexpr bool has_slopes(Router const& router) { return router.score != Score::softmax; }

// Whether the gradient of the weights needs the logits: it depends on experts that were not chosen,
// or on values that cannot be derived from the scores.
constexpr bool needs_logits(Router const& router) {
  return router.renormalize ? router.sum_floor > 0 : router.score == Score::softmax;
}

struct Route {
  int64_t tokens = 0, experts = 0, top_k = 0;
  DType dtype = DType::float32;  // of logits and scores: float32 or float64
  Router router = {};
  ConstRows logits = {};                 // (T, E)
  void const* selection_bias = nullptr;  // (E); null: none
  int32_t* ids = nullptr;                // (T, K) out, best first
  void* scores = nullptr;                // (T, K) out
  // (T) bytes: 0 marks padding, whose ids are -1 and scores 0. Null: no token is padding.
  uint8_t const* token_mask = nullptr;
  // (T, K) out: d(log p) / dlogit of the chosen, for the gradient; 1 - p for sigmoid. Null: not
  // wanted, and always null with softmax.
  void* slopes = nullptr;
};

// dlogits = d(sum(scores * dscores)) / dlogits, written densely. Computed from the scores without
// the logits, unless needs_logits(router): softmax without renormalize, or a sum_floor.
struct RouterGradient {
  int64_t tokens = 0, experts = 0, top_k = 0;
  DType dtype = DType::float32;
  Router router = {};
  int32_t const* ids = nullptr;   // (T, K); ids outside [0, E) get no gradient
  void const* scores = nullptr;   // (T, K) as Route gave them
  void const* slopes = nullptr;   // (T, K) as Route gave them; null with softmax
  void const* dscores = nullptr;  // (T, K)
  ConstRows logits = {};          // (T, E) as given to Route; null data unless needs_logits(router)
  Rows dlogits = {};              // (T, E) out
  // Where tokens have lists of any length: see Routing::token_offsets.
  int64_t slots = -1;
  int32_t const* token_offsets = nullptr;
  DType rounded_to = DType::float32;  // of dlogits: bfloat16 or float16; float32: not rounded
};

// Stable counting sort of slots by expert: an expert's rows are in the order of their slots. Slots
// with an id outside [0, E), before token_offsets[0] or at or past token_offsets[T] get no row:
// their slot_row is -1. So is that of slots whose row would be `room` or later (Sizes::room), but
// the offsets count them: offsets[E] is the number of rows needed.
struct Sort {
  int64_t tokens = 0, experts = 0, top_k = 0;
  DType score_dtype = DType::float32;  // float32 or float64
  bool ids_are_int64 = false;
  void const* ids = nullptr;     // (T, K) int32 or int64
  void const* scores = nullptr;  // (T, K); null: no row_score is written
  int32_t* offsets = nullptr;    // (E + 1) out
  int32_t* row_token = nullptr;  // (R) out; rows past offsets[E] are set to 0
  int32_t* slot_row = nullptr;   // (T, K) out
  void* row_score = nullptr;     // (R) out, with scores; rows past offsets[E] are set to 0
  void* workspace = nullptr;     // sort_workspace_bytes()
  // Where tokens have lists of any length: see Routing::token_offsets. Arrays by slot are (slots),
  // and the workspace is that of (slots, E, 1).
  int64_t slots = -1;
  int32_t const* token_offsets = nullptr;
  int64_t room = -1;  // as Sizes::room
};

// Token rounding (SonicMoE, arXiv:2512.14080): makes each expert's number of tokens a multiple of
// `tile`. It drops the tokens with the smallest p among those that chose the expert, or adds those
// with the largest p among the others; of equal ones, tokens with smaller indices stay or are added
// first. The number changes by less than a tile. If tokens run out it stays below the multiple.
enum class Rounding : int {
  nearest,  // half a tile rounds up
  up,
  down,
  stochastic,  // up with probability (number % tile) / tile
  balanced,    // up or down, so that each prefix sum over the experts is rounded to nearest
};

// Turns the choices of Route into lists of varying length, one per token, with ascending experts.
// Weights are computed as in Route, over the list instead of the K choices. A token's ids must be
// distinct, as Route writes them; tokens whose first id is outside [0, E) are padding.
struct TokenRounding {
  int64_t tokens = 0, experts = 0, top_k = 0;
  DType dtype = DType::float32;
  Router router = {};  // its groups are ignored: tokens are added to experts of any group
  Rounding rounding = Rounding::nearest;
  int64_t tile = 128;
  ConstRows logits = {};             // (T, E) as given to Route
  int32_t const* ids = nullptr;      // (T, K) as Route gave them
  int64_t const* seed = nullptr;     // (1) with Rounding::stochastic, else null
  int32_t* token_offsets = nullptr;  // (T + 1) out
  int32_t* list_ids = nullptr;       // (rounded_slots()) out; -1 past token_offsets[T]
  void* scores = nullptr;            // (rounded_slots()) out; 0 past token_offsets[T]
  void* slopes = nullptr;            // the same, as in Route
  void* workspace = nullptr;         // rounding_workspace_bytes()
};

// The sums that load-balancing losses and the z-loss need, in one pass over the logits. Tokens form
// `sequences` equal, consecutive ranges, each summed separately. p is the softmax of a token's
// logits, or their sigmoids or sqrt_softplus divided by the sum of these:
//   counts[s, e]  how many ids of the sequence are e
//   shares[s, e]  sum of p[t, e] over its tokens t
//   squares[s]    sum of logsumexp(logits[t])^2
struct BalanceSums {
  int64_t tokens = 0, experts = 0, top_k = 0;
  int64_t sequences = 1;  // divides T; any number if T = 0, all sums are then zero
  DType dtype = DType::float32;
  Score score = Score::softmax;
  ConstRows logits = {};                // (T, E)
  int32_t const* ids = nullptr;         // (T, K); ids outside [0, E) are not counted
  uint8_t const* token_mask = nullptr;  // (T); tokens with 0 are left out; null: all are counted
  void *shares = nullptr, *squares = nullptr;  // (sequences, E), (sequences) out
  int32_t* counts = nullptr;                   // (sequences, E) out
  void* workspace = nullptr;                   // balance_workspace_bytes()
};

// dlogits from the gradients of shares and squares, written densely.
struct BalanceGradient {
  int64_t tokens = 0, experts = 0, sequences = 1;
  DType dtype = DType::float32;
  Score score = Score::softmax;
  ConstRows logits = {};                // (T, E)
  uint8_t const* token_mask = nullptr;  // (T)
  void const* dshares = nullptr;        // (sequences, E)
  void const* dsquares = nullptr;       // (sequences)
  Rows dlogits = {};                    // (T, E) out
};

}  // namespace guild
