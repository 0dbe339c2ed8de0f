// The matrices of weight gradients, one per group, as the host hands them to the kernels.
#pragma once
#include <cstdint>

#include "cuda/products.h"
#include "cuda/sm90/epilogues.cuh"
#include "cuda/sm90/launch.cuh"

namespace guild::cuda::sm90 {

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

  // Whether TMA can write them.
  bool have_boxes() const {
    bool const aligned =
        d.expert_stride % 8 == 0 && reinterpret_cast<uintptr_t>(d.data) % 16 == 0 &&
        (transposed() ? d.out_stride == 1 && d.in_stride % 8 == 0 : d.out_stride % 8 == 0);
    return aligned && dtype != DType::float32 && !accumulate;
  }

  // name: of their argument, for errors.
  template <class T>
  StoreExpert<T> boxes(char const* name) const {
    constexpr int box = kBoxColumns;
    int64_t const z = places(d, groups), stride = d.expert_stride;
    MapShape const shape = transposed()
                               ? MapShape{rows, columns, z, d.in_stride, stride, box, 64, 1}
                               : MapShape{columns, rows, z, d.out_stride, stride, box, 64, 1};
    return {tensor_map(d.data, dtype, shape, name), transposed(), int(columns), d.expert_at};
  }
};

}  // namespace guild::cuda::sm90
