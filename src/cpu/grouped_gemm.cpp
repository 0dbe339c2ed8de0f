// D = A B + bias for every group, whichever dimension the groups split.
#include "checks/check.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

namespace {

using Ragged = GroupedGemm::Ragged;

// One group's part of the product: ranges of m, n and k. The part of D past the last group has
// index kNoGroup and is set to zero.
struct Group {
  int64_t index;
  Span m, n, k;
};
constexpr int64_t kNoGroup = -1;

std::vector<Group> groups_of(GroupedGemm const& x) {
  std::vector<Group> all;
  Span const m{0, x.m}, n{0, x.n}, k{0, x.k};
  if (x.ragged == Ragged::none) {
    for (int64_t e = 0; e < x.groups; ++e) all.push_back({e, m, n, k});
    return all;
  }
  int64_t const total = x.ragged == Ragged::rows ? x.m : x.ragged == Ragged::inner ? x.k : x.n;
  auto const add = [&](int64_t index, Span part) {
    all.push_back({index, x.ragged == Ragged::rows ? part : m,
                   x.ragged == Ragged::columns ? part : n, x.ragged == Ragged::inner ? part : k});
  };
  int64_t end = 0;
  for (Block const& b : group_rows({x.offsets, int(x.groups), int(total)})) {
    add(b.expert, b.rows);
    end = b.rows.first + b.rows.count;
  }
  if (x.ragged != Ragged::inner && !x.accumulate) add(kNoGroup, {end, total - end});
  return all;
}

// An operand as (rows, cols) of one group; the group counts only where there is one matrix a group.
template <class T>
View<T> view_of(GroupedGemm::Operand const& o, int64_t group, bool stacked) {
  return {static_cast<T*>(o.data) + (stacked ? start_of(group, o.group_stride, o.group_at) : 0),
          o.row_stride, o.col_stride};
}

// C = A B over the group's k, in pieces that keep the converted operands small.
template <class T>
void sum_products(GroupedGemm const& x, Group const& g, Span rows, Span cols, Compute<T>* c,
                  Scratch& scratch) {
  bool const rows_stacked = x.ragged == Ragged::columns || x.ragged == Ragged::none;
  bool const cols_stacked = x.ragged == Ragged::rows || x.ragged == Ragged::none;
  auto const a = view_of<T>(x.a, g.index, rows_stacked);
  auto const b = view_of<T>(x.b, g.index, cols_stacked);
  auto const kept = scratch.position();
  for (Span const& part : spans(g.k.count, kBlockInner)) {
    scratch.rewind(kept);
    int64_t const k = g.k.first + part.first;
    multiply(operand(scratch, a.from(rows.first, k), rows.count, part.count),
             operand(scratch, b.from(k, cols.first), part.count, cols.count), c, rows.count,
             cols.count, part.count, part.first > 0);
  }
}

// C[i, j] += bias[j], or bias[i] for Ragged::columns.
template <class T>
void add_bias(GroupedGemm const& x, Group const& g, Span rows, Span cols, Compute<T>* c,
              Scratch& scratch) {
  bool const down = x.ragged == Ragged::columns;
  Span const part = down ? rows : cols;
  auto* const bias = scratch.take<Compute<T>>(part.count);
  T const* const from = rows_of<T>(x.bias, down ? x.m : x.n).row(g.index);
  load(from + part.first, 1, bias, part.count);
  for (int64_t i = 0; i < rows.count; ++i) {
    for (int64_t j = 0; j < cols.count; ++j) c[i * cols.count + j] += bias[down ? i : j];
  }
}

template <class T, class D>
void product_block(GroupedGemm const& x, Group const& g, Span rows, Span cols) {
  using F = Compute<T>;
  // An empty sum is zero, and gets no bias, so that empty groups are exact zeros in every case.
  bool const empty = g.index == kNoGroup || g.k.count == 0;
  if (empty && x.accumulate) return;
  Scratch scratch;
  F* const c = scratch.take<F>(rows.count * cols.count);
  std::fill_n(c, rows.count * cols.count, F(0));
  if (!empty) {
    sum_products<T>(x, g, rows, cols, c, scratch);
    if (x.bias.data != nullptr) add_bias<T>(x, g, rows, cols, c, scratch);
  }
  bool const stacked = x.ragged == Ragged::inner || x.ragged == Ragged::none;
  D* const out =
      static_cast<D*>(x.d.data) + (stacked ? start_of(g.index, x.d.group_stride, x.d.group_at) : 0);
  store_block(c, rows, cols, out, x.d.row_stride, x.d.col_stride, x.accumulate, scratch);
}

struct Tile2D {
  Span rows, cols;
};

}  // namespace

void grouped_gemm(GroupedGemm const& x) {
  require_processor();
  check(x);
  std::vector<std::pair<Group, Tile2D>> tiles;
  for (Group const& g : groups_of(x)) {
    for (Span const& rows : spans(g.m.count, kBlockRows)) {
      for (Span const& cols : spans(g.n.count, kBlockColumns)) {
        tiles.push_back(
            {g, {{g.m.first + rows.first, rows.count}, {g.n.first + cols.first, cols.count}}});
      }
    }
  }
  double const work = double(x.m * x.n) * double(x.k);
  with_elements(x.dtype, x.out_dtype, [&]<class T, class D>() {
    parallel(int64_t(tiles.size()), work, [&](int64_t i) {
      auto const& [group, tile] = tiles[i];
      product_block<T, D>(x, group, tile.rows, tile.cols);
    });
  });
}

}  // namespace guild::cpu
