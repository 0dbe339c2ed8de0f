// D[r] = sum over k of A[r, k] W[expert of r, n, k] + bias: the plain product by row.
//
// Serves the down projection, the up gradient and grouped_gemm, which differ only in strides.
#pragma once
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {

struct RowProduct {
  DType dtype = DType::bfloat16;
  int64_t rows = 0, n = 0, k = 0;  // k: of one half
  Groups groups;                   // of the rows
  ConstRows a;                     // (rows, halves * k)
  int halves = 1;                  // the sum runs over W[0], then W[1]
  ConstWeight w[2];                // (E, n, k) as (out, in)
  ConstRows bias;                  // (E, n); null data: none
  Rows d;                          // (rows, n)
  DirectOutput direct;             // instead of d where its data is not null
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

}  // namespace guild::cuda
