// The composites: the steps of a layer's forward and backward, and the layout of the workspace.
//
// Shared by both backends: Steps has one callable per step (src/cpu/moe.cpp, src/cuda/moe.cu). In
// backward, the steps that read dH and A' run soon after they are written, while both are in L2.
#pragma once
#include <algorithm>

#include "guild/steps.h"
#include "shared/bias_sums.h"
#include "shared/dtype.h"
#include "shared/workspace.h"

namespace guild {

// Whether rows are combined by token. slot_row alone does not tell: lists without slots leave it
// null.
constexpr bool has_slots(Routing const& routing) {
  return routing.slot_row != nullptr || routing.token_offsets != nullptr;
}

// Whether backward sums dX over the rows of a token.
constexpr bool combines_rows(MoeBackward const& b) {
  return b.dx.data != nullptr && has_slots(b.routing);
}

// Whether there are bias gradients to make.
template <class Step>
constexpr bool wants_biases(Step const& x) {
  return x.db_up.data != nullptr || x.db_down.data != nullptr;
}

// On a GPU the products of a composite claim their tiles from counters that are cleared together
// (cuda::Counters): the up and the down projection; the up projection that recomputes H, and the
// two gradients. If a composite runs more products (weight gradients without a schedule, for
// instance), the counters are cleared again.
constexpr int64_t kForwardCounters = 2, kBackwardCounters = 3;

struct ForwardWorkspace {
  void *a, *y;        // (R, I), (R, H); y unused where rows are not combined
  int32_t* counters;  // (kForwardCounters)
  void* shared_a;     // (T, shared), right after a
};
// shared: the width of shared experts that are computed together with the others, or 0.
inline ForwardWorkspace carve_forward(Carver& carver, Sizes const& s, DType dtype,
                                      int64_t shared = 0) {
  int64_t const bytes = element_bytes(dtype), rows = s.rows();
  int64_t const own = rows * s.intermediate, more = s.tokens * shared;
  auto* const a = static_cast<char*>(carver.take(own + more, bytes));
  void* const y = carver.take(rows, s.hidden, bytes);
  int64_t const products = rows > 0 ? kForwardCounters : 0;
  void* const counters = carver.take(products, int64_t(sizeof(int32_t)));
  return {a, y, static_cast<int32_t*>(counters), a == nullptr ? nullptr : a + own * bytes};
}

// The down gradient's workspace: sums of the columns of dH and of s dO per chunk of rows, float32.
struct BiasSums {
  void *dh, *dout;  // (most_bias_chunks(R, E), W), (most_bias_chunks(R, E), H)
};
inline BiasSums carve_bias_sums(Carver& carver, Sizes const& s, bool gated) {
  int64_t const bytes = most_bias_chunks(s.rows(), s.experts) * int64_t(sizeof(float));
  void* const dh = carver.take(bytes, s.intermediate, gated ? 2 : 1);
  return {dh, carver.take(bytes, s.hidden)};
}

// What the weight gradients need besides their operands.
struct ScheduleMemory {
  WeightSchedule schedule;
  int32_t* counters = nullptr;  // (kBackwardCounters)
};
inline ScheduleMemory carve_schedule(Carver& carver, Sizes const& s) {
  if (s.rows() == 0) return {};
  auto const numbers = [&](int64_t count) {
    return static_cast<int32_t*>(carver.take(count * int64_t(sizeof(int32_t))));
  };
  int32_t* const order = numbers(s.experts);
  int32_t* const taken = numbers(WeightSchedule::kCounters);
  return {{order, taken}, numbers(kBackwardCounters)};
}

struct BackwardWorkspace {
  void *dh, *a_scaled;  // (R, W), (R, I); unused where the caller keeps them
  void* score_parts;    // (R, parts)
  void* dx_rows;        // (R, H); until then, the down gradient's workspace
  ScheduleMemory memory;
};
struct BackwardNeeds {
  bool combines;  // dx_rows
  bool biases;    // their gradients
  bool keeps;     // dh and a_scaled are the caller's
};
inline BackwardWorkspace carve_backward(Carver& carver, Sizes const& s, DType dtype, bool gated,
                                        BackwardNeeds needs) {
  int64_t const bytes = element_bytes(dtype), kept = needs.keeps ? 0 : s.rows();
  void* const dh = carver.take(kept, s.intermediate, gated ? 2 : 1, bytes);
  void* const a_scaled = carver.take(kept, s.intermediate, bytes);
  Carver rows(nullptr);
  if (needs.combines) rows.take(s.rows(), s.hidden, bytes);
  int64_t const sums = needs.biases ? down_gradient_workspace_bytes(s, gated) : 0;
  void* const dx_rows = carver.take(std::max(rows.used(), sums));
  void* const parts = carver.take(s.rows(), score_parts(s), element_bytes(score_dtype(dtype)));
  return {.dh = dh,
          .a_scaled = a_scaled,
          .score_parts = parts,
          .dx_rows = dx_rows,
          .memory = carve_schedule(carver, s)};
}

inline ForwardWorkspace workspace_of(MoeForward const& f) {
  Carver carver(f.workspace);
  return carve_forward(carver, f.sizes, f.dtype);
}
inline BackwardWorkspace workspace_of(MoeBackward const& b) {
  Carver carver(b.workspace);
  return carve_backward(
      carver, b.sizes, b.dtype, b.activation.gated,
      {.combines = combines_rows(b), .biases = wants_biases(b), .keeps = b.dh.data != nullptr});
}
inline ScheduleMemory workspace_of(MoeWeightGradients const& g) {
  Carver carver(g.workspace);
  return carve_schedule(carver, g.sizes);
}

// The arguments of single steps, taken from those of a whole layer.
inline UpProjection up_projection_of(MoeForward const& f, Rows a) {
  return {.sizes = f.sizes,
          .dtype = f.dtype,
          .activation = f.activation,
          .order = f.order,
          .routing = f.routing,
          .x = f.x,
          .w_up = f.w_up,
          .bias = f.b_up,
          .h = f.h,
          .a = a};
}
inline DownProjection down_projection_of(MoeForward const& f, Rows a, Rows y) {
  return {.sizes = f.sizes,
          .dtype = f.dtype,
          .routing = f.routing,
          .a = a,
          .w_down = f.w_down,
          .bias = f.b_down,
          .y = y};
}
inline DownGradient down_gradient_of(MoeBackward const& b, Rows dh, Rows a_scaled,
                                     BackwardWorkspace const& w) {
  return {.sizes = b.sizes,
          .dtype = b.dtype,
          .activation = b.activation,
          .order = b.order,
          .routing = b.routing,
          .dout = b.dout,
          .w_down = b.w_down,
          .h = b.h,
          .dh = dh,
          .a_scaled = a_scaled,
          .score_parts = b.dscores != nullptr ? w.score_parts : nullptr,
          .db_up = b.db_up,
          .db_down = b.db_down,
          .db_dtype = b.dw_dtype,
          .accumulate = b.accumulate,
          .workspace = w.dx_rows};
}
inline ScoreGradient score_gradient_of(MoeBackward const& b, BackwardWorkspace const& w) {
  return {.sizes = b.sizes,
          .dtype = b.dtype,
          .routing = b.routing,
          .score_parts = w.score_parts,
          .dout = b.dout,
          .bias = b.b_down,
          .dscores = b.dscores};
}
inline UpGradient up_gradient_of(MoeBackward const& b, Rows dh, Rows dx) {
  return {.sizes = b.sizes,
          .dtype = b.dtype,
          .gated = b.activation.gated,
          .order = b.order,
          .routing = b.routing,
          .dh = dh,
          .w_up = b.w_up,
          .dx = dx};
}

template <class Steps>
void compose_forward(MoeForward const& f, ForwardWorkspace const& w, Steps const& steps) {
  if (f.sort != nullptr) steps.sort_by_expert(*f.sort);
  Rows const a{w.a, 0};
  bool const combined = has_slots(f.routing);
  steps.up_projection(up_projection_of(f, a));
  Rows const y = combined ? Rows{w.y, 0} : f.o;
  DownProjection down = down_projection_of(f, a, y);
  down.after_up = true;
  if (!combined) return steps.down_projection(down);
  steps.down_and_combine(down, {.sizes = f.sizes,
                                .dtype = f.dtype,
                                .routing = f.routing,
                                .y = y,
                                .o = f.o,
                                .residual = f.residual,
                                .residual_scale = f.residual_scale});
}

// memory: receives the schedule.
template <class Steps>
void compose_weight_gradients(MoeWeightGradients const& g, WeightSchedule const& memory,
                              Steps const& steps) {
  bool const up = g.dw_up.gate.data != nullptr, down = g.dw_down.data != nullptr;
  WeightSchedule schedule{};
  if (g.sizes.rows() > 0 && (up || down)) {
    schedule = steps.schedule_weight_gradients(g.sizes, g.routing, memory);
  }
  if (down) {
    steps.down_weight_gradient({.sizes = g.sizes,
                                .dtype = g.dtype,
                                .dw_dtype = g.dw_dtype,
                                .accumulate = g.accumulate,
                                .routing = g.routing,
                                .dout = g.dout,
                                .a = g.a_scaled,
                                .dw = g.dw_down,
                                .schedule = schedule});
  }
  if (up) {
    steps.up_weight_gradient({.sizes = g.sizes,
                              .dtype = g.dtype,
                              .dw_dtype = g.dw_dtype,
                              .accumulate = g.accumulate,
                              .gated = g.gated,
                              .order = g.order,
                              .routing = g.routing,
                              .x = g.x,
                              .dh = g.dh,
                              .dw = g.dw_up,
                              .schedule = schedule});
  }
}

// The part of backward that can be left for later.
inline MoeWeightGradients weight_gradients_of(MoeBackward const& b, Rows dh, Rows a_scaled) {
  return {.sizes = b.sizes,
          .dtype = b.dtype,
          .dw_dtype = b.dw_dtype,
          .accumulate = b.accumulate,
          .gated = b.activation.gated,
          .order = b.order,
          .routing = b.routing,
          .x = b.x,
          .dout = b.dout,
          .dh = dh,
          .a_scaled = a_scaled,
          .dw_up = b.dw_up,
          .dw_down = b.dw_down};
}

template <class Steps>
void compose_backward(MoeBackward const& b, Steps const& steps) {
  BackwardWorkspace const w = workspace_of(b);
  bool const keeps = b.dh.data != nullptr;
  Rows const dh = keeps ? b.dh : Rows{w.dh}, a_scaled = keeps ? b.a_scaled : Rows{w.a_scaled};
  steps.down_gradient(down_gradient_of(b, dh, a_scaled, w));
  if (b.dscores != nullptr) steps.score_gradient(score_gradient_of(b, w));
  compose_weight_gradients(weight_gradients_of(b, dh, a_scaled), w.memory.schedule, steps);
  Rows const dx_rows = combines_rows(b)            ? Rows{w.dx_rows, 0}
                       : b.dx_rows.data != nullptr ? b.dx_rows
                                                   : b.dx;
  if (dx_rows.data == nullptr && !combines_rows(b)) return;  // combining no rows writes zeros
  steps.up_gradient(up_gradient_of(b, dh, dx_rows));
  if (!combines_rows(b)) return;
  Routing sum = b.routing;
  sum.slot_score = nullptr;
  steps.combine({.sizes = b.sizes, .dtype = b.dtype, .routing = sum, .y = dx_rows, .o = b.dx});
}

}  // namespace guild
