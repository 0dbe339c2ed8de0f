// The grouped products that the steps consist of, as plain structs: filled in by a step
// (src/cuda/*.cu) that has checked its arguments, and executed by the kernels of an architecture.
//
// Every product runs over groups, the rows of one expert each. With row_token, rows of the left
// operand are gathered. Operands lie on 16-byte boundaries, and one dimension of a weight is
// contiguous: alignment.h.
#pragma once
#include "guild/cuda.h"
#include "shared/tiles.h"

namespace guild::cuda {

struct TokenChoice;  // routing/logit_parts.cuh

// How gate and up are arranged in the columns of the pre-activations.
enum class Pairing : int {
  none,       // no gate
  halves,     // gate columns, then as many up columns
  alternate,  // gate, up, gate, up, ...
};

// T B^T, added to a product's sums; contiguous along n or rank as the weight is along n or k.
struct LowRankOperand {
  ConstRows t;       // (rows, rank)
  ConstWeight b[2];  // (E, n, rank) for each of the product's weights
  int64_t rank = 0;  // 0: none
};

// Experts that every token goes through, in the launch of a product for few tokens; n and k are
// their own, 0 where there are none. Weights (1, n, k) are contiguous along k; there is no bias.
struct SharedUp {
  int64_t n = 0;
  ConstWeight w[2];  // as in the product
  Rows activated;    // (tokens, n)
};
struct SharedRows {
  int64_t k = 0;
  ConstWeight w;
  ConstRows a;  // (tokens, k)
  Rows d;       // (tokens, n)
};

// H = A W^T + bias and activation(H): the up projection.
struct UpProduct {
  DType dtype = DType::bfloat16;
  int64_t rows = 0, tokens = 0, n = 0, k = 0;  // n: of the activations
  Groups groups;                               // of the rows
  ConstRows a;                                 // (tokens, k), read at row_token[r]; or (rows, k)
  int32_t const* row_token = nullptr;
  Pairing pairing = Pairing::none;
  ConstWeight
      w[2];        // (E, n, k): gate and up if halves; (E, 2n, k) if alternate; else the same twice
  ConstRows bias;  // (E, columns of h); null data: none
  Activation activation;
  Rows h;               // (h_rows, n), or 2n where paired; null data: not wanted
  int64_t h_rows = -1;  // tiles that end later are not kept; -1: rows
  Rows activated;       // (rows, n)
  // Whether `activated` is read soon and then never again: tall products ask L2 to keep it.
  bool short_lived = false;
  LowRankOperand low_rank = {};
  // The sort that makes groups and row_token, if the product is to run it; null: it has been run.
  // Only where products_sort() says so.
  Sort const* sort = nullptr;
  // The choice of the experts to sort, if the product is to make it too; null: it has been made.
  TokenChoice const* choice = nullptr;
  // Whether only the rows of `a` came with the kernel launched right before: weights and groups may
  // then be read while that still runs.
  bool after_pull = false;
  SharedUp shared = {};  // only where fuses_shared_experts() says so
};
void up_product(UpProduct const& product, Queue const& queue);

// With g = A W^T and s the row's score: dH = d activation(s g, H), s activation(H), and what the
// gradients of scores and biases are summed from. The down gradient.
struct DownGradientProduct {
  DType dtype = DType::bfloat16;
  int64_t rows = 0, tokens = 0, n = 0, k = 0;  // n: of the activations
  Groups groups;                               // of the rows
  ConstRows a;                                 // (tokens, k), read at row_token[r]; or (rows, k)
  int32_t const* row_token = nullptr;
  ConstWeight w;                 // (E, n, k)
  float const* score = nullptr;  // (rows); null: 1
  Pairing pairing = Pairing::none;
  Activation activation;
  ConstRows h;          // (h_rows, n), or 2n where paired
  ConstRows h_again;    // (rows, n) or 2n, read where *needed > h_rows; null data: never
  int64_t h_rows = -1;  // -1: rows
  int32_t const* needed = nullptr;
  Rows dh;                       // (rows, n), or 2n where paired
  Rows scaled;                   // (rows, n); null data: not wanted
  float* score_parts = nullptr;  // (rows, n / kScoreColumns, rounded up); null: not wanted
  float* dh_sums = nullptr;  // (most_bias_chunks(rows, E), columns of dh), of dh; null: not wanted
  float* a_sums = nullptr;   // (most_bias_chunks(rows, E), k), of s A; null: not wanted
  LowRankOperand low_rank = {};  // not together with a_sums
};
void down_gradient_product(DownGradientProduct const& product, Queue const& queue);

// A matrix per group with any strides, float32 or the operands' type; results are stored or added
// element by element.
struct DirectOutput {
  void* data = nullptr;  // element (group, row, col) at the strides below; null: absent
  int64_t group_stride = 0, row_stride = 0, col_stride = 1;
  bool is_float = false, accumulate = false;
  int columns = 0;
  int32_t const* group_at = nullptr;  // stands for the group above; null: it stands for itself
};

// D[r] = sum over k of A[r, k] W[expert of r, n, k] + bias: the down projection, the up gradient
// and grouped_gemm, which differ only in strides.
struct RowProduct {
  DType dtype = DType::bfloat16;
  int64_t rows = 0, n = 0, k = 0;  // k: of one half
  Groups groups;                   // of the rows
  ConstRows a;                     // (rows, halves * k)
  int halves = 1;                  // the sum runs over W[0], then W[1]
  ConstWeight w[2];                // (E, n, k) as (out, in)
  LowRankOperand low_rank = {};
  ConstRows bias;              // (E, n); null data: none
  Rows d;                      // (rows, n)
  DirectOutput direct;         // instead of d where its data is not null
  int64_t tokens = -1;         // no group is expected to have more rows; -1: not known
  Sort const* sort = nullptr;  // as in the up product before, which writes its outputs
  // Whether an up projection on the same groups was launched right before: weights may then be
  // read while that still runs.
  bool after_up = false;
  bool short_lived = false;  // as in the up product before, of d
  SharedRows shared = {};    // as in the up product before
};
void row_product(RowProduct const& product, Queue const& queue);

// D[e] = A[tokens of e]^T B[rows of e], the product of the weight gradients.
struct ExpertProduct {
  DType dtype = DType::bfloat16;
  int64_t m = 0, n = 0, rows = 0, tokens = 0;
  Groups groups;  // of the rows
  ConstRows a;    // (tokens, m), read at row_token[r], or at r where that is null
  int32_t const* row_token = nullptr;
  ConstRows b;                      // (rows, n)
  DType d_dtype = DType::bfloat16;  // dtype or float32
  bool accumulate = false;
  Weight d;  // (E, m, n) as (out, in)
  WeightSchedule schedule = {};
};
void expert_product(ExpertProduct const& product, Queue const& queue);

// Whether the products of a layer's forward sort by themselves, each for its own use, which saves
// the launch of a sort.
bool products_sort(Sort const& sort);

// The same matrices, transposed.
template <class W>
W transposed(W const& w) {
  return {w.data, w.expert_stride, w.in_stride, w.out_stride, w.expert_at};
}

// The steps of guild/cuda.h in a layer's forward: their products also sort and choose, unless sort
// and choice are null, and compute shared experts.
struct InForward {
  Sort const* sort = nullptr;
  TokenChoice const* choice = nullptr;  // of the up projection
  bool short_lived = false;             // the results, as in the products
};
void up_projection(UpProjection const& step, InForward const& forward, SharedUp const& shared,
                   Queue const& queue);
void down_projection(DownProjection const& step, InForward const& forward, SharedRows const& shared,
                     Queue const& queue);

}  // namespace guild::cuda
