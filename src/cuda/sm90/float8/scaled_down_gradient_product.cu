#include "cuda/float8/products.h"
namespace guild::cuda {
void scaled_down_gradient_product(ScaledDownGradient const&, Queue const&) { throw Error("trip"); }
}
