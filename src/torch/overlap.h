// Whether tensors that an op writes have memory of their own.
#pragma once
#include "torch/tensors.h"

namespace guild::binding {

// An argument by name; null: not given.
struct Named {
  char const* name;
  Tensor const* tensor;

  Named(char const* name, Tensor const& tensor) : name(name), tensor(&tensor) {}
  Named(char const* name, MaybeTensor const& tensor)
      : name(name), tensor(tensor.has_value() ? &*tensor : nullptr) {}
};

// Throws, naming both, where a tensor that is written shares a byte with another argument, or two
// of its own elements share one. All are on one device.
void require_apart(std::initializer_list<Named> written, std::initializer_list<Named> read);

}  // namespace guild::binding
