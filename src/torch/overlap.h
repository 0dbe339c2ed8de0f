// Checks that tensors that an op writes do not overlap with others.
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

// The tensor to compare, or none if it is a list of separate matrices: other tensors may lie
// between these, so Python compares them one by one.
inline MaybeTensor own_memory(MaybeTensor const& tensor, MaybeTensor const& experts_at) {
  return experts_at.has_value() ? std::nullopt : tensor;
}

// Throws if a tensor that is written shares a byte with another argument, naming both, or if its
// own elements overlap. All tensors are on one device.
void require_apart(std::initializer_list<Named> written, std::initializer_list<Named> read);

}  // namespace guild::binding
