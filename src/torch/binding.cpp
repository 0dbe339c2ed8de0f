// torch.ops.guild: the ops of every file, and those that say what this build and machine can do.
//
// LibTorch stable ABI with TORCH_TARGET_VERSION 2.10, no Python C API: one library serves every
// torch from 2.10 on and every Python. Fake kernels and gradients are in python/guild/_torch.
#include <torch/csrc/stable/library.h>

#include <string>

#include "torch/exchange.h"
#include "torch/ops.h"

namespace guild::binding {
namespace {

bool cuda_built() { return cuda::built(); }

// Why the current CUDA device cannot be used; empty if it can.
std::string cuda_reason() {
  char const* why = "";
  return cuda::usable(&why) ? "" : why;
}

void define(Library& m) {
  m.def("cuda_built() -> bool");
  m.def("cuda_reason() -> str");
  m.def("num_sms() -> int");
  m.def("set_num_sms(int count, bool shared) -> ()");
  define_routing(m);
  define_balancing(m);
  define_logits(m);
  define_layer(m);
  define_inference(m);
  define_steps(m);
  define_weight_gradients(m);
  define_products(m);
  define_exchange(m);
  define_peer_layer(m);
  define_float8(m);
  define_scaled_steps(m);
  define_quantize(m);
  define_microscaling(m);
}

void implement(Library& m) {
  implement_routing(m);
  implement_balancing(m);
  implement_logits(m);
  implement_layer(m);
  implement_inference(m);
  implement_steps(m);
  implement_weight_gradients(m);
  implement_products(m);
  implement_exchange(m);
  implement_peer_layer(m);
  implement_float8(m);
  implement_scaled_steps(m);
  implement_quantize(m);
  implement_microscaling(m);
}

}  // namespace
}  // namespace guild::binding

STABLE_TORCH_LIBRARY(guild, m) { guild::binding::define(m); }

// One kernel for both keys: the backend follows from the first tensor's device.
STABLE_TORCH_LIBRARY_IMPL(guild, CPU, m) { guild::binding::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(guild, CUDA, m) { guild::binding::implement(m); }

// Ops without tensors.
STABLE_TORCH_LIBRARY_IMPL(guild, CompositeExplicitAutograd, m) {
  m.impl("cuda_built", TORCH_BOX(&guild::binding::cuda_built));
  m.impl("peer_memory_sizes", TORCH_BOX(&guild::binding::peer_memory_sizes));
  m.impl("num_sms", TORCH_BOX(&guild::binding::num_sms));
  m.impl("set_num_sms", TORCH_BOX(&guild::binding::set_num_sms));
  m.impl("cuda_reason", TORCH_BOX(&guild::binding::cuda_reason));
}
