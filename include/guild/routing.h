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
// (DeepSeek-V4). Selection: the K largest of p + selection_bias, ties to the smaller id, NaN after
// every number; where neither a bias nor a sum over a group needs p itself, the K largest logits,
// which is the same order without p's rounding. With groups, which are equal, consecutive parts of
// the experts, only experts of the top_groups best groups are chosen.
//
// Weights: p of the chosen without the bias, divided by max(their sum, sum_floor) if renormalize,
// times scale. softmax + renormalize equals top-k followed by softmax over the chosen. With
// softmax, a NaN among the logits makes all weights NaN; with the other scores, a NaN that is
// chosen makes its own weight NaN, and with renormalize all of them. Where p of all chosen experts
// is 0, sigmoid and sqrt_softplus give weights of 0: with renormalize and no sum_floor that takes
// logits of -infinity; otherwise a p too small for dtype is 0 as well. Other infinities follow from
// the formulas.
struct Router {
  Score score = Score::softmax;
  bool renormalize = true;
  double scale = 1;    // 0 or in float32's normal range, as sum_floor
  int groups = 1;      // divides E; at most 32
  int top_groups = 1;  // groups to choose from; together they have at least K experts
  GroupScore group_score = GroupScore::top2_sum;
  double sum_floor = 0;  // only with renormalize (ERNIE 4.5: 1e-12)
};

// Whether p of an expert depends on its own logit alone; slopes then come with the scores.
constexpr bool has_slopes(Router const& router) { return router.score != Score::softmax; }

// Whether the gradient of the weights depends on logits of experts that were not chosen, or on
// something that cannot be derived from the scores.
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

// dlogits = d(sum(scores * dscores)) / dlogits, in one dense write. Computed from the scores
// without the logits, unless the scores are softmax over all experts or the sum has a floor.
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

// Stable counting sort of slots by expert: rows of one expert keep the order of their slots. Ids
// outside [0, E) get no row (slot_row = -1), nor do slots before token_offsets[0] and at or past
// token_offsets[T]. With less room than slots (Sizes::room), rows from `room` on are left out too,
// but counted in the offsets: offsets[E] is the room that all of them need.
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

// Token rounding (SonicMoE, arXiv:2512.14080): each expert's count of tokens becomes a
// multiple of `tile`, by dropping the tokens with the least p among those that chose it, or adding
// those with the greatest p among the others; ties go to the smaller token. Each expert's count
// changes by less than a tile. Fewer are added if there are no more tokens.
enum class Rounding : int {
  nearest,  // half a tile rounds up
  up,
  down,
  stochastic,  // up with the probability rest / tile
  balanced,    // up or down so that running sums over the experts are rounded to nearest
};

// Turns the choices of Route into lists of any length, with experts ascending in each. Weights are
// computed as in Route, over the list instead of the K choices. The ids of a token are distinct, as
// Route writes them; tokens whose first id is outside [0, E) are padding.
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

// The sums that load balancing needs of a router, in one pass over its logits. The tokens are cut
// into `sequences` equal, consecutive parts, each summed separately; p is the softmax of a token's
// logits, or their sigmoids or sqrt_softplus divided by the sum of these:
//   counts[s, e]  how many ids of the sequence are e
//   shares[s, e]  sum of p[t, e] over its tokens t
//   squares[s]    sum of logsumexp(logits[t])^2
struct BalanceSums {
  int64_t tokens = 0, experts = 0, top_k = 0;
  int64_t sequences = 1;  // divides T; with T = 0 the sums of any number of them are zeros
  DType dtype = DType::float32;
  Score score = Score::softmax;
  ConstRows logits = {};                // (T, E)
  int32_t const* ids = nullptr;         // (T, K); ids outside [0, E) are not counted
  uint8_t const* token_mask = nullptr;  // (T); tokens with 0 are left out; null: all are counted
  void *shares = nullptr, *squares = nullptr;  // (sequences, E), (sequences) out
  int32_t* counts = nullptr;                   // (sequences, E) out
  void* workspace = nullptr;                   // balance_workspace_bytes()
};

// dlogits from the gradients of shares and squares, one dense write.
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
