// D = A B^T + bias for groups of rows of quantised operands.
#include "checks/check.h"
#include "cpu/float8/scaled_sums.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

template <class D>
void product_block(ScaledGroupedGemm const& x, int64_t expert, Span rows, Span cols) {
  Scratch scratch;
  float* const sum = scratch.take<float>(rows.count * cols.count);
  std::fill_n(sum, rows.count * cols.count, 0.f);
  auto const a = rows_of<uint8_t>(x.a, x.halves * x.k);
  for (int64_t half = 0; half < x.halves; ++half) {
    int64_t const blocks = half * scale_blocks(x.k);
    ScaledMatrix b = scaled_matrix(x.b, columns_from(x.b_scales, blocks), expert, x.b_format);
    b.codes = b.codes.from(0, half * x.k);
    add_scaled_sums({a.data + half * x.k, a.stride, columns_from(x.a_scales, blocks), x.a_format},
                    b, rows, cols, x.k, sum, scratch);
  }
  if (x.bias.data != nullptr) {
    float* const bias = scratch.take<float>(cols.count);
    load(rows_of<D>(x.bias, x.n).row(expert) + cols.first, 1, bias, cols.count);
    for (int64_t i = 0; i < rows.count * cols.count; ++i) sum[i] += bias[i % cols.count];
  }
  auto const out = rows_of<D>(x.d, x.n);
  store_block(sum, rows, cols, out.data, out.stride, 1, false, scratch);
}

}  // namespace

void scaled_grouped_gemm(ScaledGroupedGemm const& x) {
  require_processor();
  check(x);
  Groups const groups{x.offsets, int(x.groups), int(x.m)};
  with_narrow_element(x.out_dtype, [&]<class D> {
    double const work = double(x.m * x.n) * double(x.halves * x.k);
    parallel_pairs(row_blocks(groups), spans(x.n, kBlockColumns), work,
                   [&](Block const& block, Span cols) {
                     product_block<D>(x, block.expert, block.rows, cols);
                   });
    auto const all = group_rows(groups);
    auto const d = rows_of<D>(x.d, x.n);
    for (int64_t r = all.back().rows.first + all.back().rows.count; r < x.m; ++r) {
      std::fill_n(d.row(r), x.n, D{});
    }
  });
}

}  // namespace guild::cpu
