// dW1[e] = dH[rows of e]^T X[row_token of them]
#include "checks/check.h"
#include "cpu/weight_gradient.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

void up_weight_gradient(UpWeightGradient const& x) {
  require_processor();
  check(x);
  Sizes const& s = x.sizes;
  auto const experts = group_rows(expert_groups(x.routing.offsets, s.experts, s.rows()));
  with_elements(x.dtype, x.dw_dtype, [&]<class T, class D>() {
    auto const dh = rows_of<T>(x.dh, s.intermediate * (x.gated ? 2 : 1));
    RowSource<T> const right{rows_of<T>(x.x, s.hidden), x.routing.row_token, {0, 1}, s.tokens};
    RowSource<T> const gate{dh, nullptr, gate_half(x.order, x.gated)};
    weight_gradient<T, D>(gate, right, experts, s.intermediate, s.hidden, x.dw.gate, x.accumulate);
    if (!x.gated) return;
    RowSource<T> const up{dh, nullptr, up_half(x.order, s.intermediate)};
    weight_gradient<T, D>(up, right, experts, s.intermediate, s.hidden, x.dw.up, x.accumulate);
  });
}

}  // namespace guild::cpu
