// O[t] = residual[t] + sum over k of slot_score[t, k] * Y[slot_row[t, k]]: one block a token, eight
// columns a thread, in fp32 with k ascending.
#include "alignment.h"
#include "check.h"
#include "element.cuh"
#include "shared/routing.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void combine_kernel(T const* y, int64_t y_stride, T const* residual,
                               int64_t residual_stride, T* o, int64_t o_stride,
                               int32_t const* slot_row, float const* slot_score,
                               int32_t const* token_offsets, int rows, int top_k, int hidden) {
  int64_t const token = blockIdx.x;
  auto const [begin, end] = slots_of(token_offsets, rows, top_k, token);
  int32_t const* const row_of = slot_row + begin;
  int const count = int(end - begin);
  for (int col = threadIdx.x * 8; col < hidden; col += kThreads * 8) {
    Eight sum{};
    if (residual != nullptr) sum = load_eight(residual + token * residual_stride + col);
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      int const row = row_of[k];
      if (unsigned(row) >= unsigned(rows)) continue;
      float const s = slot_score == nullptr ? 1.f : slot_score[begin + k];
      Eight const v = load_eight(y + row * y_stride + col);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum.value[i] += s * v.value[i];
    }
    store_eight(o + token * o_stride + col, sum);
  }
}

}  // namespace

void combine(Combine const& x, Queue queue) {
  check(x);
  Sizes const& s = x.sizes;
  require_16_bit(x.dtype);
  require_multiple_of_8(s.hidden, "hidden");
  require_aligned(x.y, "y");
  require_aligned(x.residual, "residual");
  require_aligned(x.o, "o");
  if (s.tokens == 0) return;
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    combine_kernel<T><<<unsigned(s.tokens), kThreads, 0, queue.stream>>>(
        static_cast<T const*>(x.y.data), row_stride(x.y, s.hidden),
        static_cast<T const*>(x.residual.data), row_stride(x.residual, s.hidden),
        static_cast<T*>(x.o.data), row_stride(x.o, s.hidden), x.routing.slot_row,
        static_cast<float const*>(x.routing.slot_score), x.routing.token_offsets, int(s.rows()),
        int(s.top_k), int(s.hidden));
  });
  cuda_check(cudaGetLastError(), "launch of combine");
}

}  // namespace guild::cuda
