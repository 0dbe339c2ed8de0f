// dW2[e] = dO[row_token of e]^T A'[rows of e]
#include "checks/check.h"
#include "cpu/weight_gradient.h"
#include "guild/cpu.h"
#include "processor.h"

namespace guild::cpu {

void down_weight_gradient(DownWeightGradient const& x) {
  require_processor();
  check(x);
  Sizes const& s = x.sizes;
  auto const experts = group_rows(expert_groups(x.routing.offsets, s.experts, s.rows()));
  with_elements(x.dtype, x.dw_dtype, [&]<class T, class D>() {
    RowSource<T> const left{rows_of<T>(x.dout, s.hidden), x.routing.row_token, {0, 1}, s.tokens};
    RowSource<T> const right{rows_of<T>(x.a, s.intermediate), nullptr, {0, 1}};
    weight_gradient<T, D>(left, right, experts, s.hidden, s.intermediate, x.dw, x.accumulate);
  });
}

}  // namespace guild::cpu
