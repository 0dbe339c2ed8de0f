// The data of one layer case: inputs in a device's memory and, as doubles, on the host.
#pragma once
#include <memory>
#include <string>

#include "device.h"
#include "guild/steps.h"
#include "reference.h"
#include "shared/dtype.h"

namespace guild::test {

// Weights of the up projection in the case's layout.
class UpWeights {
 public:
  UpWeights(Device& device, LayerParam const& p, DType dtype);

  void set(Matrix const* halves);  // gate, up: (E * I, H)
  void poison();
  Matrix half(bool up) const;
  UpWeight view() const;
  std::vector<std::byte> raw() const;
  void expect_untouched_around(char const* name) const;

 private:
  LayerParam p_;
  std::vector<Tensor> tensors_;  // one packed, or gate and up
  template <class Visit>
  void visit(Visit&& element) const;  // element(up, row, col, tensor, index)
};

class Layer {
 public:
  Layer(Device& device, LayerParam const& p);

  // A matrix of fresh normal numbers times `scale`, in dtype, on host and device.
  struct Input {
    Matrix host;
    std::shared_ptr<Tensor> device;
    ConstRows view() const { return device == nullptr ? ConstRows{} : device->view(); }
  };
  Input input(int64_t rows, int64_t cols, double scale = 1, bool strided = true);
  Input input_of(Matrix const& values, DType dtype, bool strided);
  Tensor output(int64_t rows, int64_t cols) const;
  Matrix random(int64_t rows, int64_t cols, double scale, DType dtype);

  Routing routing() const;  // everything the case has
  Reference<double> truth() const { return {p, rowing}; }
  Reference<float> yardstick() const { return {p, rowing}; }
  DType score_dtype() const { return guild::score_dtype(p.dtype); }
  int64_t input_rows() const { return p.shape.sorted ? s.rows() : s.tokens; }
  int64_t used() const { return rowing.used(); }

  Device& device;
  LayerParam p;
  Sizes s;
  Rowing rowing;
  Matrix scores, row_scores;  // (T, K), (R, 1)

 private:
  uint64_t seed_ = 0;
  Indices<int32_t> offsets_, row_token_, slot_row_;
  std::shared_ptr<Tensor> slot_score_, row_score_;
};

}  // namespace guild::test
