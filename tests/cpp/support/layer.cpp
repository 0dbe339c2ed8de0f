// Makes the inputs of a layer case.
#include "layer.h"

#include <gtest/gtest.h>

#include <random>

namespace guild::test {

namespace {

constexpr int64_t kExtraStride = 16;  // elements between rows of a strided case

bool separate(Layout layout) {
  return layout == Layout::separate || layout == Layout::separate_interleaved;
}

bool transposed(Layout layout) {
  return layout == Layout::concatenated_transposed || layout == Layout::interleaved_transposed;
}

}  // namespace

UpWeights::UpWeights(Device& device, LayerParam const& p, DType dtype) : p_(p) {
  Sizes const& s = p.shape.sizes;
  int64_t const pad = p.shape.strided ? kExtraStride : 0;
  if (separate(p.layout)) {
    for (int half = 0; half < (p.gated() ? 2 : 1); ++half) {
      tensors_.emplace_back(device, dtype, s.experts * s.intermediate, s.hidden, s.hidden + pad);
    }
  } else if (transposed(p.layout)) {
    tensors_.emplace_back(device, dtype, s.experts * s.hidden, p.width());
  } else {
    tensors_.emplace_back(device, dtype, s.experts * p.width(), s.hidden);
  }
}

template <class Visit>
void UpWeights::visit(Visit&& element) const {
  Sizes const& s = p_.shape.sizes;
  for (int up = 0; up < (p_.gated() ? 2 : 1); ++up) {
    for (int64_t row = 0; row < s.experts * s.intermediate; ++row) {
      int64_t const e = row / s.intermediate, o = row % s.intermediate;
      bool const alternate = p_.gated() && p_.order() == GateUp::interleaved;
      int64_t const packed = alternate ? 2 * o + up : o + up * s.intermediate;
      for (int64_t col = 0; col < s.hidden; ++col) {
        if (separate(p_.layout)) {
          element(up, row, col, up, row * s.hidden + col);
        } else if (transposed(p_.layout)) {
          element(up, row, col, 0, (e * s.hidden + col) * p_.width() + packed);
        } else {
          element(up, row, col, 0, (e * p_.width() + packed) * s.hidden + col);
        }
      }
    }
  }
}

void UpWeights::set(Matrix const* halves) {
  std::vector<std::vector<double>> values;
  for (Tensor const& t : tensors_) values.emplace_back(t.rows() * t.cols());
  visit([&](int up, int64_t row, int64_t col, int tensor, int64_t index) {
    values[tensor][index] = halves[up](row, col);
  });
  for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].set(values[i]);
}

void UpWeights::poison() {
  for (Tensor& t : tensors_) t.poison();
}

Matrix UpWeights::half(bool wanted) const {
  std::vector<std::vector<double>> values;
  for (Tensor const& t : tensors_) values.push_back(t.get());
  Matrix m(p_.shape.sizes.experts * p_.shape.sizes.intermediate, p_.shape.sizes.hidden);
  visit([&](int up, int64_t row, int64_t col, int tensor, int64_t index) {
    if (up == wanted) m(row, col) = values[tensor][index];
  });
  return m;
}

UpWeight UpWeights::view() const {
  Sizes const& s = p_.shape.sizes;
  if (separate(p_.layout)) {
    int64_t const stride = tensors_[0].view().stride;
    Weight const gate{tensors_[0].data(), s.intermediate * stride, stride, 1};
    Weight up = gate;
    if (p_.gated()) up.data = tensors_[1].data();
    return {gate, up};
  }
  return up_weight<Weight>(tensors_[0].data(), s, p_.gated(), p_.order(), transposed(p_.layout),
                           bytes_of(tensors_[0].dtype()));
}

std::vector<std::byte> UpWeights::raw() const {
  std::vector<std::byte> all;
  for (Tensor const& t : tensors_) {
    auto const part = t.raw();
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

void UpWeights::expect_untouched_around(char const* name) const {
  for (Tensor const& t : tensors_) t.expect_untouched_from(t.rows(), name);
}

Layer::Layer(Device& device, LayerParam const& p)
    : device(device),
      p(p),
      s(p.shape.sizes),
      rowing(rowing_of(p.shape, std::hash<std::string>{}(p.shape.name))),
      offsets_(device, rowing.offsets),
      row_token_(device, rowing.row_token),
      slot_row_(device, rowing.slot_row) {
  seed_ = std::hash<std::string>{}(p.name());
  scores = random(s.tokens, s.top_k, 0.5, score_dtype());
  row_scores = Matrix(s.rows(), 1);
  for (int64_t slot = 0; slot < s.rows(); ++slot) {
    if (rowing.slot_row[slot] >= 0) row_scores(rowing.slot_row[slot], 0) = scores.values[slot];
  }
  slot_score_ = input_of(scores, score_dtype(), false).device;
  row_score_ = input_of(row_scores, score_dtype(), false).device;
}

Matrix Layer::random(int64_t rows, int64_t cols, double scale, DType dtype) {
  std::mt19937_64 generator(++seed_);
  std::normal_distribution<double> normal(0, scale);
  Matrix m(rows, cols);
  for (double& v : m.values) v = round_to(dtype, normal(generator));
  return m;
}

Layer::Input Layer::input_of(Matrix const& values, DType dtype, bool strided) {
  int64_t const pad = strided && p.shape.strided ? kExtraStride : 0;
  auto tensor =
      std::make_shared<Tensor>(device, dtype, values.rows, values.cols, values.cols + pad);
  tensor->set(values.values);
  return {values, tensor};
}

Layer::Input Layer::input(int64_t rows, int64_t cols, double scale, bool strided) {
  return input_of(random(rows, cols, scale, p.dtype), p.dtype, strided);
}

Tensor Layer::output(int64_t rows, int64_t cols) const {
  return Tensor(device, p.dtype, rows, cols, cols + (p.shape.strided ? kExtraStride : 0));
}

Routing Layer::routing() const {
  Routing r;
  r.offsets = offsets_.data();
  r.row_score = row_score_->data();
  if (p.shape.sorted) return r;
  r.row_token = row_token_.data();
  r.slot_row = slot_row_.data();
  r.slot_score = slot_score_->data();
  return r;
}

}  // namespace guild::test
