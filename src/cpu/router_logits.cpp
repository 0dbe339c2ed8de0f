// logits = x W^T + bias: the reference for the router's product. Every sum has the same order, and
// every token goes through the same loop, so that its bits do not depend on the others.
#include "checks/router_logits.h"
#include "cpu/views.h"
#include "guild/cpu.h"
#include "processor.h"
#include "shared/router_product.h"
#include "shared/routing.h"

namespace guild::cpu {

namespace {

// Tokens and experts whose sums stay in registers.
constexpr int64_t kTokens = 4, kExperts = 16;

// sum[t][e] = sum over k of x[t][k] w[k][e]
template <class F>
void sum_chunk(F const* x, int64_t x_stride, F const* w, int64_t w_stride, int64_t count,
               F (&sum)[kTokens][kExperts]) {
  for (auto& row : sum) std::fill_n(row, kExperts, F(0));
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t t = 0; t < kTokens; ++t) {
      F const value = x[t * x_stride + k];
      for (int64_t e = 0; e < kExperts; ++e) sum[t][e] += value * w[k * w_stride + e];
    }
  }
}

// Rows of a matrix as (rows, count) of F, from column `first` on; zeros past the last row.
template <class T, class F>
void load_rows(TypedRows<T const> const& from, Span rows, int64_t padded, Span k, F* to) {
  for (int64_t i = 0; i < rows.count; ++i) {
    load(from.row(rows.first + i) + k.first, 1, to + i * k.count, k.count);
  }
  std::fill_n(to + rows.count * k.count, (padded - rows.count) * k.count, F(0));
}

template <class F>
void transpose(F const* from, int64_t rows, int64_t cols, F* to) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) to[j * rows + i] = from[i * cols + j];
  }
}

// The bias of expert e in the logits' type.
template <class T, class F>
F bias_of(RouterLogits const& x, int64_t e) {
  F value;
  if (x.bias_dtype == x.dtype) {
    load(static_cast<T const*>(x.bias) + e, 1, &value, 1);
  } else {
    value = static_cast<F const*>(x.bias)[e];
  }
  return value;
}

// The logits of some tokens and experts.
template <class T, class F>
void multiply_block(RouterLogits const& x, TypedRows<F> const& out, Span tokens, Span experts) {
  int64_t const padded_tokens = ceil_div(tokens.count, kTokens) * kTokens;
  int64_t const padded_experts = ceil_div(experts.count, kExperts) * kExperts;
  int64_t const chunk = std::min(router_chunk(x.hidden), x.hidden);
  Scratch scratch;
  F* const a = scratch.take<F>(padded_tokens * chunk);
  F* const rows = scratch.take<F>(padded_experts * chunk);
  F* const b = scratch.take<F>(padded_experts * chunk);
  F* const bias = scratch.take<F>(experts.count);
  for (int64_t e = 0; e < experts.count; ++e) {
    bias[e] = x.bias == nullptr ? F(0) : bias_of<T, F>(x, experts.first + e);
  }
  for (Span const& k : spans(x.hidden, chunk)) {
    load_rows(rows_of<T>(x.x, x.hidden), tokens, padded_tokens, k, a);
    load_rows(rows_of<T>(x.weight, x.hidden), experts, padded_experts, k, rows);
    transpose(rows, padded_experts, k.count, b);
    for (int64_t t = 0; t < tokens.count; t += kTokens) {
      for (int64_t e = 0; e < experts.count; e += kExperts) {
        F sum[kTokens][kExperts];
        sum_chunk(a + t * k.count, k.count, b + e, padded_experts, k.count, sum);
        for (int64_t i = t; i < std::min(t + kTokens, tokens.count); ++i) {
          F* const row = out.row(tokens.first + i) + experts.first;
          for (int64_t j = e; j < std::min(e + kExperts, experts.count); ++j) {
            F const before = k.first > 0 ? row[j] : bias[j];
            row[j] = before + sum[i - t][j - e];
          }
        }
      }
    }
  }
}

void multiply(RouterLogits const& x, Rows const& logits) {
  std::vector<Span> const tokens = spans(x.tokens, kBlockRows / 2), experts = spans(x.experts, 128);
  double const work = double(x.tokens * x.experts) * double(x.hidden);
  with_element(x.dtype, [&]<class T>() {
    using F = Compute<T>;
    parallel_pairs(tokens, experts, work, [&](Span const& t, Span const& e) {
      multiply_block<T>(x, rows_of<F>(logits, x.experts), t, e);
    });
  });
}

}  // namespace

void router_logits(RouterLogits const& x) {
  require_processor();
  check(x);
  require(x.logits.data != nullptr || x.tokens == 0, "logits: expected a pointer, got null");
  require(x.gate.data == nullptr, "gate: expected null because there is no router");
  multiply(x, x.logits);
  if (!x.sigmoid) return;
  with_element(x.dtype, [&]<class T>() {
    using F = Compute<T>;
    for (int64_t t = 0; t < x.tokens; ++t) {
      F* const row = rows_of<F>(x.logits, x.experts).row(t);
      for (int64_t e = 0; e < x.experts; ++e) row[e] = F(1) / (F(1) + exact_exp(-row[e]));
    }
  });
}

void route_tokens(RouterLogits const& product, Route const& x) {
  require_processor();
  check(product);
  check_pair(product, x);
  Rows const logits{product.workspace};
  Route routed = x;
  routed.logits = logits;
  check(routed);
  multiply(product, logits);
  route(routed);
  if (product.gate.data != nullptr) router_logits(gate_of(product));
}

}  // namespace guild::cpu
