// Lets tests run a product with a config of their choice, so that small cases reach kernels which
// are otherwise chosen for large ones only.
#pragma once

namespace guild::cuda {

// For products that this thread launches: an index into kConfigs, or -1 (outside tests) for the one
// that is expected to be fastest. Products that cannot use the config ignore it.
inline thread_local int forced_config = -1;

// The same for the products for few tokens (decode/): 0 never, 1 wherever they can serve, 2 in tall
// tiles wherever these can, -1 (outside tests) where they are expected to be faster.
inline thread_local int forced_decode = -1;

}  // namespace guild::cuda
