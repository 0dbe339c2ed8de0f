// Weight gradients, one matrix per group: how the host passes them to the kernels, and the epilogue
// that stores them in float32.
#pragma once
#include <cstdint>

#include "cuda/products.h"
#include "cuda/sm90/add_to_expert.cuh"
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda {

// The dimension in which a matrix is contiguous.
enum class Along { columns, rows };

// One float32 matrix per group, contiguous along columns (stored in pairs, 8 bytes) or along rows.
// A warp writes whole 32-byte sectors either way.
template <Along along>
struct StoreFloats {
  DirectOutput d;

  struct Storage {};
  template <int n>
  using Parcel = AllAtOnce<n, StoreFloats>;

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }
  template <int n>
  __device__ void store(float const (&acc)[n / 2], Tile const& tile, int thread) const {
    if constexpr (along == Along::columns) {
      store_values<float2, n>(d, d.row_stride, 1, acc, tile.expert, tile.row, tile.col, tile.rows,
                              thread);
    } else {
      store_values<float, n, 32>(d, 1, d.col_stride, acc, tile.expert, tile.row, tile.col,
                                 tile.rows, thread);
    }
  }
};

// Whether StoreFloats can store a matrix, taken as contiguous along columns or along rows.
template <Along along>
bool stores_floats(DirectOutput const& d) {
  if (along == Along::rows) return d.is_float && d.row_stride == 1;
  return d.is_float && d.col_stride == 1 && d.columns % 2 == 0 && d.row_stride % 2 == 0 &&
         d.group_stride % 2 == 0 && reinterpret_cast<uintptr_t>(d.data) % 8 == 0;
}

namespace sm90 {

struct ExpertMatrices {
  Weight d;
  DType dtype;
  bool accumulate;
  int64_t groups, rows, columns;  // rows, columns: of one

  bool transposed() const { return d.in_stride != 1; }

  // Element by element, or as StoreFloats takes them.
  DirectOutput direct() const {
    return {.data = d.data,
            .group_stride = d.expert_stride,
            .row_stride = d.out_stride,
            .col_stride = d.in_stride,
            .is_float = dtype == DType::float32,
            .accumulate = accumulate,
            .columns = int(columns),
            .group_at = d.expert_at};
  }

  // Whether TMA can read and write them.
  bool have_boxes() const {
    int64_t const unit = 16 / element_bytes(dtype);
    return d.expert_stride % unit == 0 && reinterpret_cast<uintptr_t>(d.data) % 16 == 0 &&
           (transposed() ? d.out_stride == 1 && d.in_stride % unit == 0 : d.out_stride % unit == 0);
  }

  // name: of their argument, for errors.
  template <class T>
  StoreExpert<T> boxes(char const* name) const {
    return {map(name), transposed(), int(columns), d.expert_at};
  }
  template <class V>
  AddToExpert<V> addends(char const* name) const {
    return {map(name), transposed(), int(rows), int(columns), d.expert_at};
  }

 private:
  CUtensorMap map(char const* name) const {
    int const box = kRowBytes / int(element_bytes(dtype));
    int64_t const z = places(d, groups), stride = d.expert_stride;
    MapShape const shape = transposed()
                               ? MapShape{rows, columns, z, d.in_stride, stride, box, 64, 1}
                               : MapShape{columns, rows, z, d.out_stride, stride, box, 64, 1};
    return tensor_map(d.data, dtype, shape, name);
  }
};

}  // namespace sm90
}  // namespace guild::cuda
