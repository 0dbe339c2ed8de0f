// The down gradient of codes: its choice of a kernel, and the kernels for 16-bit H.
#include "cuda/float8/scaled_products.h"
#include "cuda/sm90/float8/scaled_down_gradient_launch.cuh"

namespace guild::cuda {

void scaled_down_gradient_product(ScaledDownGradient const& x, Queue const& queue) {
  if (x.sizes.rows() == 0) return;
  Pairing const pairing = pairing_of(x.activation.gated, x.order);
  if (x.h.data == nullptr) return scaled_down_gradient_of_codes(x, queue);
  with_swiglu_or_any(static_activation_of(x.activation, pairing), [&](auto known) {
    launch_scaled_down_gradient<known.value, false>(x, pairing, queue);
  });
}

}  // namespace guild::cuda
