// The ops of torch.ops.guild by file: each file defines the schemas of its ops and implements them.
// binding.cpp registers all of them.
//
// Conventions: offsets (E + 1) are int32 row positions; w_gate is given where gate and up are two
// tensors and w_up is up alone; `interleaved` is the order of gate and up in w_up, h, dh and b_up;
// `transposed` weights are (E, in, out); experts_at is int32 (3, E), guild::Weight::expert_at of
// w_up, w_gate and w_down, or of their gradients where these are arguments; without it no weight
// has any. With token_offsets (T + 1), tokens have lists of any length, and (T, K) tensors are
// (slots) instead. Codes are passed as uint8; formats and scales are the values of Float8 and
// ScaleKind. Outputs that are not asked for are empty tensors.
#pragma once
#include <tuple>

#include "torch/tensors.h"

// The activation's scalars in a schema, in the order of activation_of().
#define GUILD_ACTIVATION \
  "int kind, bool gated, float alpha, float limit, float up_offset, bool clamp_after"

// Schema of experts_at, for weights whose matrices are not evenly spaced.
#define GUILD_LISTS ", Tensor? experts_at=None"

namespace guild::binding {

using Library = torch::stable::detail::StableLibrary;

using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors6 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors7 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

void define_routing(Library& m);
void define_balancing(Library& m);
void define_logits(Library& m);
void define_layer(Library& m);
void define_inference(Library& m);
void define_steps(Library& m);
void define_weight_gradients(Library& m);
void define_products(Library& m);
void define_exchange(Library& m);
void define_peer_layer(Library& m);
void define_float8(Library& m);
void define_scaled_steps(Library& m);
void define_quantize(Library& m);
void define_microscaling(Library& m);

void implement_routing(Library& m);
void implement_balancing(Library& m);
void implement_logits(Library& m);
void implement_layer(Library& m);
void implement_inference(Library& m);
void implement_steps(Library& m);
void implement_weight_gradients(Library& m);
void implement_products(Library& m);
void implement_exchange(Library& m);
void implement_peer_layer(Library& m);
void implement_float8(Library& m);
void implement_scaled_steps(Library& m);
void implement_quantize(Library& m);
void implement_microscaling(Library& m);

}  // namespace guild::binding
