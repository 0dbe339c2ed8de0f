// The down gradient of codes where H is in codes too: its kernels are compiled here.
#include "cuda/float8/scaled_products.h"
#include "cuda/sm90/float8/scaled_down_gradient_launch.cuh"

namespace guild::cuda {

void scaled_down_gradient_of_codes(ScaledDownGradient const& x, Queue const& queue) {
  Pairing const pairing = pairing_of(x.activation.gated, x.order);
  require(static_activation_of(x.activation, pairing) == StaticActivation::swiglu,
          "h_codes: expected the activation silu with a gate, alpha 1 and no limit or offset, and "
          "concatenated gate and up, on CUDA");
  launch_scaled_down_gradient<StaticActivation::swiglu, true>(x, pairing, queue);
}

}  // namespace guild::cuda
