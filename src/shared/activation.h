// Activations and their gradients on one (gate, up) pair. Shared by the kernels and the CPU
// backend.
//
//   a = f(g) * (u + up_offset),  g = min(gate, limit),  u = clamp(up, -limit, limit)
//
// Clamps are written as comparisons that NaN fails, so that NaN passes through; the gradient is
// zero exactly where a clamp cuts. The kind is a template argument of what runs per element, so
// that the choice is made once per tile: with_kind() turns the run-time value into the argument.
#pragma once
#include <cmath>
#include <type_traits>

#include "guild/types.h"

#ifdef __CUDACC__
#define GUILD_HD __host__ __device__ __forceinline__
#else
#define GUILD_HD inline
#endif

namespace guild {

using ActivationKind = Activation::Kind;

// Calls f(std::integral_constant<ActivationKind, kind>{}).
template <class F>
GUILD_HD auto with_kind(ActivationKind kind, F&& f) {
  switch (kind) {
    case ActivationKind::silu:
      return f(std::integral_constant<ActivationKind, ActivationKind::silu>{});
    case ActivationKind::gelu_tanh:
      return f(std::integral_constant<ActivationKind, ActivationKind::gelu_tanh>{});
    case ActivationKind::gelu_erf:
      return f(std::integral_constant<ActivationKind, ActivationKind::gelu_erf>{});
    case ActivationKind::relu:
      return f(std::integral_constant<ActivationKind, ActivationKind::relu>{});
    default:
      return f(std::integral_constant<ActivationKind, ActivationKind::relu_squared>{});
  }
}

GUILD_HD float exponential(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return expf(x);
#endif
}
GUILD_HD double exponential(double x) { return exp(x); }

template <class F>
GUILD_HD F sigmoid(F x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) return __fdividef(1.f, 1.f + exponential(-x));
#endif
  return 1 / (1 + exponential(-x));
}

template <class F>
struct ValueSlope {
  F value, slope;
};

// f(x) and f'(x).
template <ActivationKind kind, class F>
GUILD_HD ValueSlope<F> unary(F alpha, F x) {
  if constexpr (kind == ActivationKind::silu) {
    F const s = sigmoid(alpha * x);
    return {x * s, s * (1 + alpha * x * (1 - s))};
  } else if constexpr (kind == ActivationKind::gelu_tanh) {
    F const c = F(0.7978845608028654), d = F(0.044715);  // sqrt(2 / pi)
    F const s = sigmoid(2 * c * (x + d * x * x * x));    // (1 + tanh(z)) / 2 = sigmoid(2 z)
    return {x * s, s + x * s * (1 - s) * 2 * c * (1 + 3 * d * x * x)};
  } else if constexpr (kind == ActivationKind::gelu_erf) {
    F const phi = F(0.5) * (1 + F(erf(x * F(0.7071067811865476))));
    F const density = F(0.3989422804014327) * exponential(F(-0.5) * x * x);
    return {x * phi, phi + x * density};
  } else if constexpr (kind == ActivationKind::relu) {
    return {x < 0 ? F(0) : x, x > 0 ? F(1) : (x != x ? x : F(0))};
  } else {
    F const r = x < 0 ? F(0) : x;
    return {r * r, 2 * r};
  }
}

// f(clamped gate) and its slope with respect to the unclamped gate.
template <ActivationKind kind, class F>
GUILD_HD ValueSlope<F> gate_part(Activation const& act, F gate) {
  F const limit = F(act.limit);
  bool const cut = !act.clamp_after && gate > limit;
  ValueSlope<F> f = unary<kind>(F(act.alpha), cut ? limit : gate);
  if (cut) f.slope = 0;
  if (act.clamp_after && f.value > limit) f = {limit, F(0)};
  return f;
}

template <class F>
GUILD_HD F up_part(Activation const& act, F up) {
  F const limit = F(act.limit);
  F const clamped = up > limit ? limit : (up < -limit ? -limit : up);
  return clamped + F(act.up_offset);
}

// The activation of a pair; up is ignored without a gate.
template <ActivationKind kind, class F>
GUILD_HD F activate(Activation const& act, F gate, F up) {
  F const value = gate_part<kind>(act, gate).value;
  return act.gated ? value * up_part(act, up) : value;
}

template <class F>
struct PairGradient {
  F a, dgate, dup;  // the activation again, and da times its gradients
};

template <ActivationKind kind, class F>
GUILD_HD PairGradient<F> activate_gradient(Activation const& act, F gate, F up, F da) {
  ValueSlope<F> const g = gate_part<kind>(act, gate);
  if (!act.gated) return {g.value, da * g.slope, F(0)};
  F const u = up_part(act, up);
  bool const cut = up > F(act.limit) || up < -F(act.limit);
  return {g.value * u, da * u * g.slope, cut ? F(0) : da * g.value};
}

// The same with the kind chosen at run time, element by element.
template <class F>
GUILD_HD F activate(Activation const& act, F gate, F up) {
  return with_kind(act.kind, [&](auto kind) { return activate<kind.value>(act, gate, up); });
}
template <class F>
GUILD_HD PairGradient<F> activate_gradient(Activation const& act, F gate, F up, F da) {
  return with_kind(act.kind,
                   [&](auto kind) { return activate_gradient<kind.value>(act, gate, up, da); });
}

}  // namespace guild
