// The one buffer of an inference call: all memory that it needs besides its result.
#pragma once
#include "cuda/shared_expert.h"
#include "shared/workspace.h"
#include "torch/tensors.h"

namespace guild::binding {

// Buffers of at most this many bytes also hold the returned offsets, which keep them alive.
inline constexpr int64_t kSmallBuffer = 1 << 18;

struct SharedScratch {
  int32_t* offsets;  // (2)
  void* products;    // a work buffer
};

inline SharedScratch carve_shared(Carver& carver, Layer const& shared) {
  auto* const offsets = static_cast<int32_t*>(carver.take(2, sizeof(int32_t)));
  return {offsets, carver.take(moe_forward_workspace_bytes(shared.sizes, shared.dtype))};
}

// What a call needs memory for. Shared experts are described as a layer with one expert, which has
// all rows.
struct Needs {
  bool routes;             // the layer chooses its tokens' experts itself
  int64_t router_bytes;    // of the router's workspace
  Layer const* shared;     // null: none
  bool rides = false;      // shared experts are fused into the launches of the others
  bool gated = false;      // their scale is computed
  int64_t gate_bytes = 0;  // of its workspace
};

// Parts of the buffer.
struct Scratch {
  int32_t* offsets;               // (E + 1), first
  int32_t* ids;                   // (T, K), where the layer routes
  void* scores;                   // (T, K), where the layer routes
  void* router;                   // a work buffer
  int32_t *row_token, *slot_row;  // (R) each
  void *sort, *products;          // work buffers
  void* shared_rows;              // (T, H); null without shared experts
  void* shared_scale;             // (T, 1), where it is computed
  void* gate;                     // a work buffer
  SharedScratch shared;           // where shared experts have launches of their own
};

inline Scratch carve(Carver& carver, Layer const& layer, Needs const& needs) {
  Sizes const& s = layer.sizes;
  int64_t const rows = s.rows(), routed = needs.routes ? rows : 0;
  auto const indices = [&](int64_t count) {
    return static_cast<int32_t*>(carver.take(count, sizeof(int32_t)));
  };
  Scratch found{};
  found.offsets = indices(s.experts + 1);
  found.ids = indices(routed);
  found.scores = carver.take(routed, element_bytes(score_dtype(layer.dtype)));
  found.router = carver.take(needs.router_bytes);
  found.row_token = indices(rows);
  found.slot_row = indices(rows);
  found.sort = carver.take(sort_workspace_bytes(rows, s.experts, 1));
  int64_t const riding = needs.rides ? needs.shared->sizes.intermediate : 0;
  found.products =
      carver.take(needs.rides ? cuda::moe_forward_workspace_bytes(s, layer.dtype, riding)
                              : moe_forward_workspace_bytes(s, layer.dtype));
  if (needs.shared == nullptr) return found;
  found.shared_rows = carver.take(s.tokens, s.hidden, element_bytes(layer.dtype));
  found.shared_scale = carver.take(needs.gated ? s.tokens : 0, sizeof(float));
  found.gate = carver.take(needs.gate_bytes);
  if (!needs.rides) found.shared = carve_shared(carver, *needs.shared);
  return found;
}

// The buffer; lives for the duration of the call.
struct Buffer {
  int64_t bytes;
  Tensor memory;
  Scratch parts;

  Buffer(Place const& place, Layer const& layer, Needs const& needs)
      : bytes(size(layer, needs)), memory(place.workspace(bytes)) {
    Carver carver(memory.data_ptr());
    parts = carve(carver, layer, needs);
  }

 private:
  static int64_t size(Layer const& layer, Needs const& needs) {
    Carver counting(nullptr);
    carve(counting, layer, needs);
    return counting.used();
  }
};

// The offsets that a call returns.
inline Tensor offsets_in(Place const& place, Buffer const& buffer, Layer const& layer) {
  int64_t const count = layer.sizes.experts + 1;
  return buffer.bytes <= kSmallBuffer ? place.first_int32(buffer.memory, count)
                                      : place.empty_int32({count});
}

}  // namespace guild::binding
