// Activations of whole rows; one pair at a time is src/shared/activation.h.
#pragma once
#include <cstdint>

#include "guild/types.h"

namespace guild::cpu {

// a[i] = activation(gate[i], up[i]); up is not read without a gate.
template <class F>
void activate_row(Activation const& act, F const* gate, F const* up, F* a, int64_t count);

// With dA = score * g: gate and up are replaced by their gradients, a gets score * A.
// Returns <g, A>.
template <class F>
F activate_row_gradient(Activation const& act, F score, F const* g, F* gate, F* up, F* a,
                        int64_t count);

}  // namespace guild::cpu
