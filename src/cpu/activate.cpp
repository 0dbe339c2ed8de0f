// The family of the activation is chosen once a row, which leaves loops the compiler vectorises.
#include "cpu/activate.h"

#include "cpu/element.h"
#include "shared/activation.h"

namespace guild::cpu {

template <class F>
void activate_row(Activation const& act, F const* gate, F const* up, F* a, int64_t count) {
  Activation const local = act;  // the loop sees that its stores do not change it
  if (!local.gated) up = gate;   // read, ignored
  with_family(local, [&](auto family) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) a[i] = activate<family.value>(local, gate[i], up[i]);
  });
}

template <class F>
F activate_row_gradient(Activation const& act, F score, F const* g, F* gate, F* up, F* a,
                        int64_t count) {
  Activation const local = act;
  F const* const up_in = local.gated ? up : gate;
  F sum = 0;
  with_family(local, [&](auto family) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
      PairGradient<F> const d =
          activate_gradient<family.value>(local, gate[i], up_in[i], score * g[i]);
      sum += g[i] * d.a;
      gate[i] = d.dgate;
      if (local.gated) up[i] = d.dup;
      a[i] = score * d.a;
    }
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
