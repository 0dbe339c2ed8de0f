// The router's matrix product, alone or followed by routing. Symbols and null as in steps.h.
#pragma once
#include "guild/cuda.h"
#include "guild/routing.h"
#include "guild/types.h"

namespace guild {

// logits = x weight^T + bias; with 16-bit operands, summed and returned in float32.
//
// The sum over H is split into chunks whose size depends on H alone. Each chunk is summed in order,
// the bias is added to the first, and the chunks are added in order. A token's logits are therefore
// bitwise independent of the number of tokens and of the token's position and, on a GPU, of the
// number of experts.
struct RouterLogits {
  int64_t tokens = 0, hidden = 0, experts = 0;
  DType dtype = DType::bfloat16;  // of x and weight; logits are float32, or float64 in float64
  ConstRows x = {};               // (T, H)
  ConstRows weight = {};          // (E, H)
  Rows logits = {};               // (T, E) out
  void* workspace = nullptr;      // router_logits_workspace_bytes()
  bool sigmoid = false;           // whether to write sigmoid(logits) instead, as a gate's scores
  void const* bias = nullptr;     // (E); null: none
  DType bias_dtype = DType::float32;  // x's dtype or the logits'

  // A second product, which only route_tokens() computes: the gate of the shared experts,
  // gate_score = sigmoid(x gate^T). There is none if the data of `gate` is null.
  ConstRows gate = {};             // (1, H)
  void* gate_score = nullptr;      // (T) out, in the logits' dtype
  void* gate_workspace = nullptr;  // router_logits_workspace_bytes() of one expert
};

// The arguments with which router_logits() computes the gate's scores.
RouterLogits gate_of(RouterLogits const& product);

int64_t router_logits_workspace_bytes(int64_t tokens, int64_t hidden, int64_t experts, DType dtype);

namespace cpu {

void router_logits(RouterLogits const& args);

// Routes by the product's logits, which are not kept: product.logits and route.logits must be null.
void route_tokens(RouterLogits const& product, Route const& route);

}  // namespace cpu

namespace cuda {

// bfloat16 or float16; at most 1,024 experts.
void router_logits(RouterLogits const& args, Queue queue = {});

void route_tokens(RouterLogits const& product, Route const& route, Queue queue = {});

}  // namespace cuda

}  // namespace guild
