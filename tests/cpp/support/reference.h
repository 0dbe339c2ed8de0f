// Every step written again as naive loops, from the definitions in design and headers; nothing is
// shared with the library.
//
// Reference<double> from the same stored inputs is the truth. Reference<float> that rounds to the
// element type where the algorithm stores is the yardstick: a step may be twice as far from the
// truth.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cases.h"
#include "number.h"

namespace guild::test {

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;

  Matrix() = default;
  Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(rows * cols) {}
  double& operator()(int64_t i, int64_t j) { return values[i * cols + j]; }
  double operator()(int64_t i, int64_t j) const { return values[i * cols + j]; }
};

// Which rows are whose; see Routing. Rows [0, used) are in use.
struct Rowing {
  std::vector<int32_t> ids, offsets, row_token, slot_row, row_expert;
  int64_t used() const { return offsets.back(); }
};
Rowing rowing_of(Case const& c, uint64_t seed);

template <class F>
struct Pair {
  F value, slope;
};

// f(x) and f'(x).
template <class F>
Pair<F> curve(Activation const& act, F x) {
  using Kind = Activation::Kind;
  if (act.kind == Kind::silu) {
    F const alpha = act.alpha, s = 1 / (1 + std::exp(-alpha * x));
    return {x * s, s + alpha * x * s * (1 - s)};
  }
  if (act.kind == Kind::gelu_tanh) {
    F const c = std::sqrt(2 / F(M_PI)), k = F(0.044715);
    F const t = std::tanh(c * (x + k * x * x * x));
    return {x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) / 2 * c * (1 + 3 * k * x * x)};
  }
  if (act.kind == Kind::gelu_erf) {
    F const phi = (1 + std::erf(x / std::sqrt(F(2)))) / 2;
    return {x * phi, phi + x * std::exp(-x * x / 2) / std::sqrt(2 * F(M_PI))};
  }
  F const r = x > 0 ? x : 0;
  if (act.kind == Kind::relu) return {r, F(x > 0)};
  return {r * r, 2 * r};
}

template <class F>
struct Activated {
  F a, da_dgate, da_dup;
};

template <class F>
Activated<F> activated(Activation const& act, F gate, F up) {
  F const limit = act.limit;
  bool const cut_before = !act.clamp_after && gate > limit;
  Pair<F> f = curve(act, cut_before ? limit : gate);
  if (cut_before) f.slope = 0;
  if (act.clamp_after && f.value > limit) f = {limit, 0};
  if (!act.gated) return {f.value, f.slope, 0};
  F const u = std::fmin(std::fmax(up, -limit), limit) + F(act.up_offset);
  return {f.value * u, f.slope * u, std::abs(up) > limit ? 0 : f.value};
}

template <class F>
struct Reference {
  LayerParam const& p;
  Rowing const& rowing;
  Sizes s = p.shape.sizes;

  // What is in memory after a value of type F is stored.
  double keep(F value) const {
    return std::is_same_v<F, double> ? double(value) : round_to(p.dtype, value);
  }
  int64_t source(int64_t row) const { return p.shape.sorted ? row : rowing.row_token[row]; }
  int64_t column(bool up, int64_t i) const {
    if (!p.gated()) return i;
    return p.order() == GateUp::interleaved ? 2 * i + up : i + up * s.intermediate;
  }
  Matrix by_row(int64_t cols) const { return Matrix(rowing.used(), cols); }

  static F dot(double const* a, double const* b, int64_t count) {
    F sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += F(a[i]) * F(b[i]);
    return sum;
  }

  // w: gate then up, each (E * I, H); bias (E, W) or empty
  void up_projection(Matrix const& x, Matrix const* w, Matrix const& bias, Matrix& h,
                     Matrix& a) const {
    h = by_row(p.width()), a = by_row(s.intermediate);
    for (int64_t r = 0; r < h.rows; ++r) {
      int64_t const e = rowing.row_expert[r];
      for (int64_t i = 0; i < s.intermediate; ++i) {
        F pair[2] = {};
        for (int up = 0; up < (p.gated() ? 2 : 1); ++up) {
          pair[up] = dot(&x.values[source(r) * s.hidden],
                         &w[up].values[(e * s.intermediate + i) * s.hidden], s.hidden);
          if (bias.rows > 0) pair[up] += F(bias(e, column(up, i)));
          h(r, column(up, i)) = keep(pair[up]);
        }
        a(r, i) = keep(activated(p.act.activation, pair[0], pair[1]).a);
      }
    }
  }

  // w (E * H, I)
  Matrix down_projection(Matrix const& a, Matrix const& w, Matrix const& bias) const {
    Matrix y = by_row(s.hidden);
    for (int64_t r = 0; r < y.rows; ++r) {
      int64_t const e = rowing.row_expert[r];
      for (int64_t j = 0; j < s.hidden; ++j) {
        F sum = dot(&a.values[r * s.intermediate], &w.values[(e * s.hidden + j) * s.intermediate],
                    s.intermediate);
        if (bias.rows > 0) sum += F(bias(e, j));
        y(r, j) = keep(sum);
      }
    }
    return y;
  }

  // scores (T, K) or empty; residual (T, H) or empty
  Matrix combine(Matrix const& y, Matrix const& scores, Matrix const& residual = {}) const {
    Matrix o(s.tokens, s.hidden);
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t j = 0; j < s.hidden; ++j) {
        F sum = residual.rows > 0 ? F(residual(t, j)) : F(0);
        for (int64_t k = 0; k < s.top_k; ++k) {
          int32_t const r = rowing.slot_row[t * s.top_k + k];
          if (r >= 0) sum += (scores.rows > 0 ? F(scores(t, k)) : F(1)) * F(y(r, j));
        }
        o(t, j) = keep(sum);
      }
    }
    return o;
  }

  // row_score (R, 1) or empty; score_sum (R, 1) = <g, A>
  void down_gradient(Matrix const& dout, Matrix const& w, Matrix const& h, Matrix const& row_score,
                     Matrix& dh, Matrix& a_scaled, Matrix& score_sum) const {
    dh = by_row(p.width()), a_scaled = by_row(s.intermediate), score_sum = by_row(1);
    for (int64_t r = 0; r < dh.rows; ++r) {
      std::vector<F> g(s.intermediate);
      for (int64_t j = 0; j < s.hidden; ++j) {
        F const d = F(dout(source(r), j));
        double const* row = &w.values[(rowing.row_expert[r] * s.hidden + j) * s.intermediate];
        for (int64_t i = 0; i < s.intermediate; ++i) g[i] += d * F(row[i]);
      }
      F const score = row_score.rows > 0 ? F(row_score(r, 0)) : F(1);
      F sum = 0;
      for (int64_t i = 0; i < s.intermediate; ++i) {
        F const up = p.gated() ? F(h(r, column(true, i))) : F(0);
        auto const d = activated(p.act.activation, F(h(r, column(false, i))), up);
        dh(r, column(false, i)) = keep(score * g[i] * d.da_dgate);
        if (p.gated()) dh(r, column(true, i)) = keep(score * g[i] * d.da_dup);
        a_scaled(r, i) = keep(score * d.a);
        sum += g[i] * d.a;
      }
      score_sum(r, 0) = sum;
    }
  }

  // parts (R, any); dout and bias (E, H), or no bias
  Matrix score_gradient(Matrix const& parts, Matrix const& dout, Matrix const& bias) const {
    Matrix dscores(s.tokens, s.top_k);
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t k = 0; k < s.top_k; ++k) {
        int32_t const r = rowing.slot_row[t * s.top_k + k];
        if (r < 0) continue;
        F sum = 0;
        for (int64_t i = 0; i < parts.cols; ++i) sum += F(parts(r, i));
        if (bias.rows > 0) {
          sum += dot(&dout.values[t * s.hidden], &bias.values[rowing.row_expert[r] * s.hidden],
                     s.hidden);
        }
        dscores(t, k) = sum;
      }
    }
    return dscores;
  }

  Matrix up_gradient(Matrix const& dh, Matrix const* w) const {
    Matrix dx = by_row(s.hidden);
    for (int64_t r = 0; r < dx.rows; ++r) {
      std::vector<F> sum(s.hidden);
      for (int64_t i = 0; i < s.intermediate; ++i) {
        for (int up = 0; up < (p.gated() ? 2 : 1); ++up) {
          F const d = F(dh(r, column(up, i)));
          double const* row = &w[up].values[(rowing.row_expert[r] * s.intermediate + i) * s.hidden];
          for (int64_t j = 0; j < s.hidden; ++j) sum[j] += d * F(row[j]);
        }
      }
      for (int64_t j = 0; j < s.hidden; ++j) dx(r, j) = keep(sum[j]);
    }
    return dx;
  }

  // dw[e, out, in] = start + sum over rows of left(r, out) right(r, in), each by row or by token;
  // `stored` is the type of dw.
  template <class Left, class Right>
  Matrix weight_gradient(int64_t outs, int64_t ins, Left left, Right right, Matrix const& start,
                         DType stored) const {
    std::vector<F> sum(s.experts * outs * ins);
    std::vector<F> inputs(ins);
    for (int64_t r = 0; r < rowing.used(); ++r) {
      for (int64_t i = 0; i < ins; ++i) inputs[i] = F(right(r, i));
      F const* const x = inputs.data();
      F* dw = sum.data() + rowing.row_expert[r] * outs * ins;
      for (int64_t o = 0; o < outs; ++o, dw += ins) {
        F const l = F(left(r, o));
        for (int64_t i = 0; i < ins; ++i) dw[i] += l * x[i];
      }
    }
    Matrix dw(s.experts * outs, ins);
    for (size_t i = 0; i < sum.size(); ++i) {
      F const total = start.rows > 0 ? F(sum[i] + F(start.values[i])) : sum[i];
      dw.values[i] = std::is_same_v<F, double> ? double(total) : round_to(stored, total);
    }
    return dw;
  }
};

// ||out - truth|| / ||truth||; zero where both are zero.
double relative_error(std::vector<double> const& out, std::vector<double> const& truth);

// Fails unless out is within twice the yardstick's error of the truth.
void expect_close(std::vector<double> const& out, std::vector<double> const& truth,
                  std::vector<double> const& yardstick, DType stored, char const* name);

}  // namespace guild::test
