// Activations of whole rows. The family and the gate are compile-time constants in each loop, so
// that the compiler vectorises it.
#include "cpu/activate.h"

#include "cpu/element.h"
#include "shared/activation.h"

namespace guild::cpu {

namespace {

// Calls body(family, act) with the family and act.gated known at compile time.
template <class F, class Body>
void with_constants(Activation const& act, Body&& body) {
  with_family(act, [&](auto family) {
    ActivationOf<F> local = activation_in<F>(act);
    local.gated = false;
    if (!act.gated) return body(family, local);
    local.gated = true;
    body(family, local);
  });
}

}  // namespace

template <class F>
void activate_row(Activation const& act, F const* gate, F const* up, F* a, int64_t count) {
  F const* const up_in = act.gated ? up : gate;  // read, ignored
  with_constants<F>(act, [&](auto family, ActivationOf<F> const local) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) a[i] = activate<family.value>(local, gate[i], up_in[i]);
  });
}

template <class F>
F activate_row_gradient(Activation const& act, F score, F const* g, F* gate, F* up, F* a,
                        int64_t count) {
  F* const up_in = act.gated ? up : gate;
  F sum = 0;
  with_constants<F>(act, [&](auto family, ActivationOf<F> const local) {
    F part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t i = 0; i < count; ++i) {
      PairGradient<F> const d =
          activate_gradient<family.value>(local, gate[i], up_in[i], score * g[i]);
      part += g[i] * d.a;
      if (local.gated) up_in[i] = d.dup;
      gate[i] = d.dgate;
      a[i] = score * d.a;
    }
    sum = part;
  });
  return sum;
}

template void activate_row(Activation const&, float const*, float const*, float*, int64_t);
template void activate_row(Activation const&, double const*, double const*, double*, int64_t);
template float activate_row_gradient(Activation const&, float, float const*, float*, float*, float*,
                                     int64_t);
template double activate_row_gradient(Activation const&, double, double const*, double*, double*,
                                      double*, int64_t);

}  // namespace guild::cpu
