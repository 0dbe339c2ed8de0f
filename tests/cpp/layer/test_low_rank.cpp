// Low-rank terms of the steps: T B^T is what further columns of both operands add to a product.
#include "device_test.h"
#include "layer.h"

namespace guild::test {

namespace {

class LowRankTest : public DeviceTest {
 protected:
  static constexpr int64_t kRank = 72;  // more than a step of the kernels

  // Sorted rows of three experts, past the rows and columns of a tile.
  static LayerParam param(DType dtype, bool on_cuda) {
    LayerParam p;
    p.shape.name = "low_rank", p.shape.routing = "130|5|165", p.shape.sorted = true;
    p.shape.sizes = {300, 136, 264, 3, 1};
    p.act = {"swiglu", {}}, p.dtype = dtype, p.on_cuda = on_cuda;
    return p;
  }

  // Two matrices side by side.
  static Matrix beside(Matrix const& a, Matrix const& b) {
    Matrix both(a.rows, a.cols + b.cols);
    for (int64_t i = 0; i < a.rows; ++i) {
      for (int64_t j = 0; j < both.cols; ++j) {
        both(i, j) = j < a.cols ? a(i, j) : b(i, j - a.cols);
      }
    }
    return both;
  }
};

// One product's operands in a layer's memory: rows (R, in), weights (E out, in), T and B.
struct Operands {
  Matrix rows, weight, t, b;
};

ConstWeight packed(Layer::Input const& input, int64_t out, int64_t in) {
  return {input.view().data, out * in, in, 1};
}

// Y of the down projection with a term, or of joined operands.
std::vector<double> down(Layer& l, Operands const& o, bool joined) {
  auto const rows = l.input_of(o.rows, l.p.dtype, false);
  auto const weight = l.input_of(o.weight, l.p.dtype, false);
  auto const t = l.input_of(o.t, l.p.dtype, false), b = l.input_of(o.b, l.p.dtype, false);
  Tensor y = l.output(l.s.rows(), l.s.hidden);
  DownProjection step{
      l.s, l.p.dtype, l.routing(), rows.view(), packed(weight, l.s.hidden, o.rows.cols),
      {},  y.view()};
  step.sizes.intermediate = o.rows.cols;
  if (!joined) {
    step.low_rank = {t.view(), packed(b, l.s.hidden, o.t.cols), o.t.cols};
  }
  l.device.run(step);
  return y.get();
}

TEST_P(LowRankTest, DownProjection) {
  for (DType dtype : dtypes()) {
    SCOPED_TRACE(name_of(dtype));
    Layer l(device(), param(dtype, on_cuda()));
    int64_t const in = l.s.intermediate, out = l.s.hidden, experts = l.s.experts;
    Operands const o{l.random(l.s.rows(), in, 1, dtype), l.random(experts * out, in, .06, dtype),
                     l.random(l.s.rows(), kRank, 1, dtype),
                     l.random(experts * out, kRank, .1, dtype)};
    Operands const both{beside(o.rows, o.t), beside(o.weight, o.b), o.t, o.b};
    Layer exact(cpu_device(), param(DType::float64, false));
    Layer rounded(cpu_device(), param(dtype, false));
    expect_close(down(l, o, false), down(exact, both, true), down(rounded, both, true), dtype, "y");
  }
}

// A of the up projection, gate and up above each other in the weight (E 2I, in).
std::vector<double> up(Layer& l, Operands const& o, bool joined) {
  auto const rows = l.input_of(o.rows, l.p.dtype, false);
  auto const weight = l.input_of(o.weight, l.p.dtype, false);
  auto const t = l.input_of(o.t, l.p.dtype, false), b = l.input_of(o.b, l.p.dtype, false);
  Tensor a = l.output(l.s.rows(), l.s.intermediate);
  auto const halves = [&](Layer::Input const& w, int64_t in) {
    Sizes sizes = l.s;
    sizes.hidden = in;
    return up_weight<ConstWeight>(w.view().data, sizes, true, GateUp::concatenated, false,
                                  bytes_of(l.p.dtype));
  };
  UpProjection step;
  step.sizes = l.s, step.dtype = l.p.dtype, step.routing = l.routing();
  step.sizes.hidden = o.rows.cols;
  step.x = rows.view(), step.w_up = halves(weight, o.rows.cols), step.a = a.view();
  if (!joined) step.low_rank = {t.view(), halves(b, o.t.cols), o.t.cols};
  l.device.run(step);
  return a.get();
}

TEST_P(LowRankTest, UpProjection) {
  for (DType dtype : dtypes()) {
    SCOPED_TRACE(name_of(dtype));
    Layer l(device(), param(dtype, on_cuda()));
    int64_t const in = l.s.hidden, out = 2 * l.s.intermediate, experts = l.s.experts;
    Operands const o{l.random(l.s.rows(), in, 1, dtype), l.random(experts * out, in, .08, dtype),
                     l.random(l.s.rows(), kRank, 1, dtype),
                     l.random(experts * out, kRank, .1, dtype)};
    Operands const both{beside(o.rows, o.t), beside(o.weight, o.b), o.t, o.b};
    Layer exact(cpu_device(), param(DType::float64, false));
    Layer rounded(cpu_device(), param(dtype, false));
    expect_close(up(l, o, false), up(exact, both, true), up(rounded, both, true), dtype, "a");
  }
}

GUILD_DEVICE_TESTS(LowRankTest);

}  // namespace

}  // namespace guild::test
