// Tensor maps, which describe matrices to TMA.
#pragma once
#include <cuda.h>

#include "guild/types.h"

namespace guild::cuda {

// A stack of matrices of 16 bits or float32: x contiguous, strides of y, z and w in elements.
struct MapShape {
  int64_t x, y, z, y_stride, z_stride;
  int box_x, box_y, box_z;
  int64_t w = 0, w_stride = 0;  // a fourth dimension where w > 0; boxes are 1 deep there
};
CUtensorMap tensor_map(void const* data, DType dtype, MapShape const& shape, char const* name);
// The same for data that is read once: L2 promotes requests to 128 bytes, as wide as the box, not
// to 256.
CUtensorMap streamed_map(void const* data, DType dtype, MapShape const& shape, char const* name);

}  // namespace guild::cuda
