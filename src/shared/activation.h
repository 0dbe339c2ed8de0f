// Activations and their gradients on one (gate, up) pair. Shared by the kernels and the CPU
// backend.
//
//   a = f(g) * (u + up_offset),  g = min(gate, limit),  u = clamp(up, -limit, limit)
//
// Clamps are written as comparisons that NaN fails, so that NaN passes through; the gradient is
// zero exactly where a clamp cuts.
#pragma once
#include <cmath>
#include "guild/types.h"

#ifdef __CUDACC__
#define GUILD_HD __host__ __device__ __forceinline__
#else
#define GUILD_HD inline
#endif

namespace guild {

template <class F>
struct ValueSlope {
  F value, slope;
};

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

// f(x) and f'(x) of the ungated part.
template <class F>
GUILD_HD ValueSlope<F> unary(Activation const& act, F x) {
  switch (act.kind) {
    case Activation::Kind::silu: {
      F const s = sigmoid(F(act.alpha) * x);
      return {x * s, s * (1 + F(act.alpha) * x * (1 - s))};
    }
    case Activation::Kind::gelu_tanh: {
      F const c = F(0.7978845608028654), d = F(0.044715);  // sqrt(2 / pi)
      F const s = sigmoid(2 * c * (x + d * x * x * x));    // (1 + tanh(z)) / 2 = sigmoid(2 z)
      return {x * s, s + x * s * (1 - s) * 2 * c * (1 + 3 * d * x * x)};
    }
    case Activation::Kind::gelu_erf: {
      F const phi = F(0.5) * (1 + F(erf(x * F(0.7071067811865476))));
      F const density = F(0.3989422804014327) * exponential(F(-0.5) * x * x);
      return {x * phi, phi + x * density};
    }
    case Activation::Kind::relu: {
      return {x < 0 ? F(0) : x, x > 0 ? F(1) : (x != x ? x : F(0))};
    }
    default: {
      F const r = x < 0 ? F(0) : x;
      return {r * r, 2 * r};
    }
  }
}

template <class F>
struct Gate {  // f(clamped gate) and its slope with respect to the unclamped gate
  F value, slope;
};

template <class F>
GUILD_HD Gate<F> gate_part(Activation const& act, F gate) {
  F const limit = F(act.limit);
  bool const cut = !act.clamp_after && gate > limit;
  ValueSlope<F> f = unary(act, cut ? limit : gate);
  if (cut) f.slope = 0;
  if (act.clamp_after && f.value > limit) f = {limit, F(0)};
  return {f.value, f.slope};
}

template <class F>
GUILD_HD F up_part(Activation const& act, F up) {
  F const limit = F(act.limit);
  F const clamped = up > limit ? limit : (up < -limit ? -limit : up);
  return clamped + F(act.up_offset);
}

// The activation of a pair; up is ignored without a gate.
template <class F>
GUILD_HD F activate(Activation const& act, F gate, F up) {
  F const value = gate_part(act, gate).value;
  return act.gated ? value * up_part(act, up) : value;
}

template <class F>
struct PairGradient {
  F a, dgate, dup;  // the activation again, and da * its gradients
};

template <class F>
GUILD_HD PairGradient<F> activate_gradient(Activation const& act, F gate, F up, F da) {
  Gate<F> const g = gate_part(act, gate);
  if (!act.gated) return {g.value, da * g.slope, F(0)};
  F const u = up_part(act, up);
  bool const cut = up > F(act.limit) || up < -F(act.limit);
  return {g.value * u, da * u * g.slope, cut ? F(0) : da * g.value};
}

}  // namespace guild
