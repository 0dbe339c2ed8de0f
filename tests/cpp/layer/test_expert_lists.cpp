// Weights and gradients whose matrices are unevenly spaced in memory (Weight::expert_at): the same
// bits as with matrices one after another.
#include <cmath>
#include <limits>

#include "layer_test.h"

namespace guild::test {

namespace {

// One matrix of `size` elements per expert, the last expert first, at distances whose greatest
// common divisor is 16 bytes; NaN between them.
class Apart {
 public:
  Apart(Layer& l, DType dtype, int64_t size)
      : experts_(l.s.experts),
        size_(size),
        bytes_(bytes_of(dtype)),
        room_((size + 7) / 8 * 8 + 3 * kUnit),
        memory_(l.device, dtype, experts_, room_),
        at_(l.device, places()) {}
  Apart(Layer& l, DType dtype, Matrix const& all)
      : Apart(l, dtype, all.rows * all.cols / l.s.experts) {
    set(all.values);
  }

  // first: the element of each matrix that the view begins with.
  Weight view(int64_t out_stride, int64_t in_stride, int64_t first = 0) const {
    return {static_cast<char*>(memory_.data()) + first * bytes_, kUnit, out_stride, in_stride,
            at_.data()};
  }

  void set(std::vector<double> const& all) {
    std::vector<double> values(experts_ * room_, std::numeric_limits<double>::quiet_NaN());
    for (int64_t i = 0; i < experts_ * size_; ++i) values[place(i)] = all[i];
    memory_.set(values);
  }
  std::vector<double> get() const {
    std::vector<double> const values = memory_.get();
    std::vector<double> all(experts_ * size_);
    for (int64_t i = 0; i < experts_ * size_; ++i) all[i] = values[place(i)];
    int64_t numbers = 0;
    for (double value : values) numbers += !std::isnan(value);
    EXPECT_EQ(numbers, experts_ * size_) << "written between the experts' matrices";
    return all;
  }
  void poison() { memory_.poison(); }

 private:
  static constexpr int64_t kUnit = 8;

  int64_t start(int64_t e) const { return (experts_ - 1 - e) * room_ + e % 3 * kUnit; }
  int64_t place(int64_t i) const { return start(i / size_) + i % size_; }
  std::vector<int32_t> places() const {
    std::vector<int32_t> at;
    for (int64_t e = 0; e < experts_; ++e) at.push_back(int32_t(start(e) / kUnit));
    return at;
  }

  int64_t experts_, size_, bytes_, room_;
  Tensor memory_;
  Indices<int32_t> at_;
};

// The up projection's weight (E, 2I or I, H): one list, or one each if gate and up are halves.
class UpLists {
 public:
  UpLists(Layer& l, Matrix const& packed, bool gated, GateUp order)
      : hidden_(l.s.hidden), alternate_(gated && order == GateUp::interleaved) {
    if (!gated || alternate_) {
      lists_.emplace_back(l, l.p.dtype, packed);
      return;
    }
    int64_t const rows = l.s.intermediate;
    for (int64_t half = 0; half < 2; ++half) {
      Matrix part(l.s.experts * rows, hidden_);
      for (int64_t r = 0; r < part.rows; ++r) {
        int64_t const from = (r / rows * 2 + half) * rows + r % rows;
        for (int64_t c = 0; c < hidden_; ++c) part(r, c) = packed(from, c);
      }
      lists_.emplace_back(l, l.p.dtype, part);
    }
  }

  ConstUpWeight view() const {
    if (alternate_) {
      return {lists_[0].view(2 * hidden_, 1), lists_[0].view(2 * hidden_, 1, hidden_)};
    }
    return {lists_.front().view(hidden_, 1), lists_.back().view(hidden_, 1)};
  }

 private:
  int64_t hidden_;
  bool alternate_;
  std::vector<Apart> lists_;
};

class ExpertLists : public LayerTest {
 protected:
  // Runs a step on contiguous matrices, then on lists, and expects the same bits.
  template <class Step>
  void expect_same(Step const& packed, Step const& lists, std::vector<Tensor*> const& outputs) {
    std::vector<std::vector<std::byte>> expected;
    for (Tensor* t : outputs) t->poison();
    layer().device.run(packed);
    for (Tensor* t : outputs) expected.push_back(t->raw());
    run_twice(lists, outputs);
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(expected[i] == outputs[i]->raw()) << "output " << i << " differs";
    }
  }
};

TEST_P(ExpertLists, Down) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  int64_t const out = l.s.hidden, in = l.s.intermediate;
  for (bool transposed : {false, true}) {
    int64_t const out_stride = transposed ? 1 : in, in_stride = transposed ? out : 1;
    Matrix const w = l.random(l.s.experts * out, in, .1, p.dtype);
    auto const whole = l.input_of(w, p.dtype, false);
    ConstWeight const packed{whole.view().data, out * in, out_stride, in_stride};
    Apart const list(l, p.dtype, w);
    auto const a = l.input(l.s.rows(), in);
    Tensor y = l.output(l.s.rows(), out);
    DownProjection down{l.s, p.dtype, l.routing(), a.view(), packed, {}, y.view()}, apart = down;
    apart.w_down = list.view(out_stride, in_stride);
    expect_same(down, apart, {&y});

    auto const dout = l.input(l.input_rows(), out), h = l.input(l.s.rows(), p.width());
    Tensor dh = l.output(l.s.rows(), p.width()), scaled = l.output(l.s.rows(), in);
    Tensor parts(l.device, l.score_dtype(), l.s.rows(), score_parts(l.s));
    DownGradient gradient{l.s,         p.dtype,       p.act.activation, p.order(),
                          l.routing(), dout.view(),   packed,           h.view(),
                          dh.view(),   scaled.view(), parts.data()};
    DownGradient gradient_apart = gradient;
    gradient_apart.w_down = apart.w_down;
    expect_same(gradient, gradient_apart, {&dh, &scaled, &parts});
  }
}

TEST_P(ExpertLists, Up) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  bool const gated = p.gated();
  Matrix const w = l.random(l.s.experts * p.width(), l.s.hidden, .1, p.dtype);
  auto const whole = l.input_of(w, p.dtype, false);
  for (GateUp order : {GateUp::concatenated, GateUp::interleaved}) {
    UpLists const lists(l, w, gated, order);
    auto const packed =
        up_weight<ConstWeight>(whole.view().data, l.s, gated, order, false, bytes_of(p.dtype));
    auto const x = l.input(l.input_rows(), l.s.hidden);
    Tensor h = l.output(l.s.rows(), p.width()), a = l.output(l.s.rows(), l.s.intermediate);
    UpProjection up{l.s,    p.dtype, p.act.activation, order,   l.routing(), x.view(),
                    packed, {},      h.view(),         a.view()};
    UpProjection apart = up;
    apart.w_up = lists.view();
    expect_same(up, apart, {&h, &a});

    auto const dh = l.input(l.s.rows(), p.width());
    Tensor dx = l.output(l.s.rows(), l.s.hidden);
    UpGradient gradient{l.s, p.dtype, gated, order, l.routing(), dh.view(), packed, dx.view()};
    UpGradient gradient_apart = gradient;
    gradient_apart.w_up = lists.view();
    expect_same(gradient, gradient_apart, {&dx});
  }
}

// The gradient is written in the layer's type, and added in float32.
TEST_P(ExpertLists, DownWeightGradient) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const dout = l.input(l.input_rows(), l.s.hidden), a = l.input(l.s.rows(), l.s.intermediate);
  int64_t const rows = l.s.experts * l.s.hidden, in = l.s.intermediate;
  for (bool add : {false, true}) {
    DType const stored = add ? DType::float32 : p.dtype;
    Matrix const before = l.random(rows, in, 1, stored);
    Tensor whole(l.device, stored, rows, in);
    Apart list(l, stored, l.s.hidden * in);
    DownWeightGradient step{
        l.s,         p.dtype,     stored,   add,
        l.routing(), dout.view(), a.view(), {whole.data(), l.s.hidden * in, in, 1}};
    add ? whole.set(before.values) : whole.poison();
    l.device.run(step);
    step.dw = list.view(in, 1);
    run_twice(step, {}, [&] { add ? list.set(before.values) : list.poison(); });
    EXPECT_EQ(list.get(), whole.get());
  }
}

TEST_P(ExpertLists, UpWeightGradient) {
  Layer& l = layer();
  LayerParam const& p = l.p;
  auto const x = l.input(l.input_rows(), l.s.hidden), dh = l.input(l.s.rows(), p.width());
  int64_t const rows = l.s.experts * p.width(), in = l.s.hidden;
  for (bool add : {false, true}) {
    DType const stored = add ? DType::float32 : p.dtype;
    Matrix const before = l.random(rows, in, 1, stored);
    Tensor whole(l.device, stored, rows, in);
    Apart list(l, stored, p.width() * in);
    UpWeightGradient step{l.s,         p.dtype,  stored,    add, p.gated(), GateUp::concatenated,
                          l.routing(), x.view(), dh.view(), {}};
    step.dw = up_weight<Weight>(whole.data(), l.s, p.gated(), step.order, false, bytes_of(stored));
    add ? whole.set(before.values) : whole.poison();
    l.device.run(step);
    step.dw = {list.view(in, 1), list.view(in, 1, l.s.intermediate * in)};
    run_twice(step, {}, [&] { add ? list.set(before.values) : list.poison(); });
    EXPECT_EQ(list.get(), whole.get());
  }
}

GUILD_LAYER_TESTS(ExpertLists, false);

}  // namespace

}  // namespace guild::test
