// Activations and their gradients on one (gate, up) pair. Shared by the kernels and the CPU
// backend.
//
//   a = f(g) * (u + up_offset),  g = min(gate, limit),  u = clamp(up, -limit, limit)
//   with clamp_after: min(f(gate), limit) in place of f(g);  without a gate: a = f(g)
//
// Clamps are comparisons, which are false for NaN, so NaN passes through; the gradient is zero
// exactly where a clamp is active. Per-element functions take the activation's family as a template
// argument, so that kernels branch once per tile: with_family() dispatches on the run-time value. P
// is the type of the activation's parameters: double in public structs, float in kernels.
#pragma once
#include <cmath>
#include <type_traits>

#include "guild/types.h"
#include "shared/exponential.h"
#include "shared/host_device.h"

namespace guild {

// The activation with parameters of type F.
template <class F>
constexpr ActivationOf<F> activation_in(Activation const& act) {
  return {.kind = act.kind,
          .gated = act.gated,
          .alpha = F(act.alpha),
          .limit = F(act.limit),
          .up_offset = act.up_offset == 0 ? F(-0.0) : F(act.up_offset),  // x + -0 is x, even for -0
          .clamp_after = act.clamp_after};
}

// Kinds of activation that share branch-free code:
//   swish     x * sigmoid(alpha x) without clamps; what most models use, half the instructions
//   sigmoid   x * sigmoid(p1 x + p3 x^3): silu (p1 = alpha) and gelu_tanh (p1 = sqrt(8 / pi))
//   other     gelu_erf, relu, relu_squared
//   clamped   silu with the gate clamped before it, bitwise equal to `sigmoid`: only in kernels
//             compiled for it
enum class Family { swish, sigmoid, other, clamped };

template <class P>
GUILD_HD Family family_of(ActivationOf<P> const& act) {
  bool const silu = act.kind == ActivationKind::silu;
  if (silu && act.limit == std::numeric_limits<P>::infinity()) return Family::swish;
  return silu || act.kind == ActivationKind::gelu_tanh ? Family::sigmoid : Family::other;
}

// Calls f(std::integral_constant<Family, family>{}).
template <class P, class F>
GUILD_HD auto with_family(ActivationOf<P> const& act, F&& f) {
  switch (family_of(act)) {
    case Family::swish:
      return f(std::integral_constant<Family, Family::swish>{});
    case Family::sigmoid:
      return f(std::integral_constant<Family, Family::sigmoid>{});
    default:
      return f(std::integral_constant<Family, Family::other>{});
  }
}

// The activation with `gated` set to a constant the caller knows, which saves a branch per element.
template <class P>
GUILD_HD ActivationOf<P> with_gate(ActivationOf<P> act, bool gated) {
  act.gated = gated;
  return act;
}

GUILD_HD float exponential(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return vector_exp(x);
#endif
}
GUILD_HD double exponential(double x) { return exp(x); }

// 1 / (1 + exp(-slope x)); on a GPU four instructions, which flush denormals to zero.
GUILD_HD float sigmoid(float x, float slope = 1) {
#ifdef __CUDA_ARCH__
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * (slope * -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.f + power));
  return result;
#else
  return 1 / (1 + exponential(-slope * x));
#endif
}
GUILD_HD double sigmoid(double x, double slope = 1) { return 1 / (1 + exponential(-slope * x)); }

// `product`, of which `factor` is a factor, or 0 if `factor` is 0, even if another factor is
// infinite. CPU only: on a GPU an infinite gate may give NaN, which saves a comparison per element.
template <class F>
GUILD_HD F unless_zero([[maybe_unused]] F factor, F product) {
#ifdef __CUDA_ARCH__
  return product;
#else
  return factor == 0 ? F(0) : product;
#endif
}

template <class F>
struct ValueSlope {
  F value, slope;
};

// f(x) and f'(x).
template <Family family, class P, class F>
GUILD_HD ValueSlope<F> unary(ActivationOf<P> const& act, F x) {
  if constexpr (family == Family::swish) {
    F const alpha = F(act.alpha), s = sigmoid(x, alpha), value = unless_zero(s, x * s);
    return {value, s + alpha * unless_zero(1 - s, value - value * s)};
  } else if constexpr (family == Family::clamped) {
    F const alpha = F(act.alpha), s = sigmoid(x * alpha), rest = 1 - s;
    return {unless_zero(s, x * s), s + unless_zero(s * rest, x * s * rest * alpha)};
  } else if constexpr (family == Family::sigmoid) {
    bool const gelu = act.kind == ActivationKind::gelu_tanh;
    F const p1 = gelu ? F(1.5957691216057308) : F(act.alpha);  // sqrt(8 / pi)
    F const p3 = gelu ? F(1.5957691216057308 * 0.044715) : F(0);
    // Clamped where s has long saturated: an infinite square times 0 would be NaN.
    F const square = x * x < F(1e6) ? x * x : F(1e6);
    F const s = sigmoid(x * (p1 + p3 * square)), rest = 1 - s;
    F const steep = x * s * rest * (p1 + 3 * p3 * square);
    return {unless_zero(s, x * s), s + unless_zero(s * rest, steep)};
  } else {
    F const positive = x < 0 ? F(0) : x;  // NaN stays
    switch (act.kind) {
      case ActivationKind::gelu_erf: {
        F const phi = F(0.5) * (1 + F(erf(x * F(0.7071067811865476))));
        F const density = F(0.3989422804014327) * exponential(F(-0.5) * x * x);
        return {unless_zero(phi, x * phi), phi + unless_zero(density, x * density)};
      }
      case ActivationKind::relu:
        return {positive, x > 0 ? F(1) : positive};
      default:
        return {positive * positive, 2 * positive};
    }
  }
}

// f(clamped gate) and its slope with respect to the unclamped gate.
template <Family family, class P, class F>
GUILD_HD ValueSlope<F> gate_part(ActivationOf<P> const& act, F gate) {
  if constexpr (family == Family::swish) return unary<family>(act, gate);
  F const limit = F(act.limit);
  bool const cut = !act.clamp_after && gate > limit;
  ValueSlope<F> f = unary<family>(act, cut ? limit : gate);
  if (cut) f.slope = 0;
  if (act.clamp_after && f.value > limit) f = {limit, F(0)};
  return f;
}

template <Family family, class P, class F>
GUILD_HD F up_part(ActivationOf<P> const& act, F up) {
  if constexpr (family == Family::swish) return up + F(act.up_offset);
  F const limit = F(act.limit);
  F const clamped = up > limit ? limit : (up < -limit ? -limit : up);
  return clamped + F(act.up_offset);
}

// The activation of a pair; up is ignored without a gate.
template <Family family, class P, class F>
GUILD_HD F activate(ActivationOf<P> const& act, F gate, F up) {
  F const value = gate_part<family>(act, gate).value;
  return act.gated ? value * up_part<family>(act, up) : value;
}

template <class F>
struct PairGradient {
  F a, dgate, dup;  // the activation, recomputed, and da times its gradients
};

template <Family family, class P, class F>
GUILD_HD PairGradient<F> activate_gradient(ActivationOf<P> const& act, F gate, F up, F da) {
  ValueSlope<F> const g = gate_part<family>(act, gate);
  if (!act.gated) return {g.value, da * g.slope, F(0)};
  F const u = up_part<family>(act, up);
  bool const cut = family != Family::swish && (up > F(act.limit) || up < -F(act.limit));
  return {g.value * u, da * u * g.slope, cut ? F(0) : da * g.value};
}

// The same with the family chosen at run time, element by element.
template <class P, class F>
GUILD_HD F activate(ActivationOf<P> const& act, F gate, F up) {
  return with_family(act, [&](auto f) { return activate<f.value>(act, gate, up); });
}
template <class P, class F>
GUILD_HD PairGradient<F> activate_gradient(ActivationOf<P> const& act, F gate, F up, F da) {
  return with_family(act, [&](auto f) { return activate_gradient<f.value>(act, gate, up, da); });
}

}  // namespace guild
