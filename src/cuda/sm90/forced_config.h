// A way for tests to run a product with a config that it would not take by itself, so that small
// cases reach kernels which are otherwise only for large ones.
#pragma once

namespace guild::cuda {

// Of the products that this thread launches: an index into kConfigs, or -1, as it is outside tests,
// for the one that is expected to be fastest. Products that it does not serve take no notice.
inline thread_local int forced_config = -1;

}  // namespace guild::cuda
