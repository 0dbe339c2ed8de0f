// A layer's scalar arguments, packed into one tensor on the host.
#pragma once
#include "torch/forward.h"
#include "torch/routing.h"

namespace guild::binding {

inline constexpr int kOfExperts = 8, kOfRouter = 8;

// The settings in the order of the ops' arguments; python/guild/moe_fast_path.py writes them.
// Passing one tensor to an op costs the host less time than 16 scalars.
class Settings {
 public:
  Settings(Tensor const& tensor, int64_t count) {
    bool const plain = tensor.is_cpu() && tensor.dim() == 1 && tensor.size(0) == count &&
                       tensor.is_contiguous() && dtype_of(tensor, "settings") == DType::float64;
    require(plain, "settings: expected a contiguous float64 CPU tensor of ", count, " numbers");
    value_ = static_cast<double const*>(tensor.data_ptr());
  }
  Activation activation() const {
    return activation_of(whole(0), flag(1), value_[2], value_[3], value_[4], flag(5));
  }
  Flags flags() const { return {flag(6), flag(7), no_lists_}; }
  int64_t top_k() const { return whole(8); }
  RouterScalars router() const {
    return {whole(9), flag(10), value_[11], whole(12), whole(13), value_[14], whole(15)};
  }

 private:
  int64_t whole(int i) const { return int64_t(value_[i]); }
  bool flag(int i) const { return value_[i] != 0; }

  double const* value_;
  MaybeTensor no_lists_;
};

}  // namespace guild::binding
