// Whether tensors that an op writes have memory of their own.
#pragma once
#include "torch/tensors.h"

namespace guild::binding {

// An argument by name, and the range of its bytes; null: not given.
struct Named {
  char const* name;
  Tensor const* tensor = nullptr;
  uintptr_t begin = 0, end = 0;

  Named(char const* name, Tensor const& tensor);
  Named(char const* name, MaybeTensor const& tensor);
};

// A tensor to compare, unless it is a list of matrices between which others' memory lies; those are
// compared one by one in Python.
inline MaybeTensor own_memory(MaybeTensor const& tensor, MaybeTensor const& experts_at) {
  return experts_at.has_value() ? std::nullopt : tensor;
}

// Throws, naming both, where a tensor that is written shares a byte with another argument, or two
// of its own elements share one. All are on one device.
void require_apart(std::initializer_list<Named> written, std::initializer_list<Named> read);

}  // namespace guild::binding
