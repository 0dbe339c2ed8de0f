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

// A weight to compare, unless it is a list of matrices between which others' memory lies; those are
// compared one by one in Python.
inline MaybeTensor own_memory(MaybeTensor const& weight, MaybeTensor const& experts_at) {
  return experts_at.has_value() ? std::nullopt : weight;
}

// Throws, naming both, where a tensor that is written shares a byte with another argument, or two
// of its own elements share one. All are on one device.
void require_apart(std::initializer_list<Named> written, std::initializer_list<Named> read);

}  // namespace guild::binding
