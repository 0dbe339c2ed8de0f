// multiply() through Eigen, single-threaded: the steps spread their blocks over threads themselves.
#include "cpu/product.h"

#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>

namespace guild::cpu {

namespace {

template <class F, int order>
using Matrix = Eigen::Matrix<F, Eigen::Dynamic, Eigen::Dynamic, order>;
template <class F, int order>
using Map = Eigen::Map<Matrix<F, order> const, 0, Eigen::OuterStride<>>;

// Calls f with an Eigen map of the view in its order.
template <class F, class Body>
void with_map(View<F> v, int64_t rows, int64_t cols, Body&& f) {
  if (v.col_stride == 1) {
    f(Map<F, Eigen::RowMajor>(v.data, rows, cols, Eigen::OuterStride<>(v.row_stride)));
  } else {
    f(Map<F, Eigen::ColMajor>(v.data, rows, cols, Eigen::OuterStride<>(v.col_stride)));
  }
}

}  // namespace

template <class F>
void multiply(View<F> a, View<F> b, F* c, int64_t m, int64_t n, int64_t k, bool add) {
  Eigen::Map<Matrix<F, Eigen::RowMajor>> out(c, m, n);
  if (k == 0) {
    if (!add) out.setZero();
    return;
  }
  with_map(a, m, k, [&](auto const& left) {
    with_map(b, k, n, [&](auto const& right) {
      if (add) {
        out.noalias() += left * right;
      } else {
        out.noalias() = left * right;
      }
    });
  });
}

template void multiply(View<float>, View<float>, float*, int64_t, int64_t, int64_t, bool);
template void multiply(View<double>, View<double>, double*, int64_t, int64_t, int64_t, bool);

}  // namespace guild::cpu
