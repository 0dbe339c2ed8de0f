// Whether two tensors share memory. Byte a of one tensor and b of another are the same where
//
//   sum over dimensions of (stride * index of a) - (stride * index of b) = first of b - first of a
//
// has a solution with indices in range: a linear Diophantine equation in a few bounded variables.
// Equal strides of both tensors are merged into one variable, the difference of the indices.
#include "torch/overlap.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace guild::binding {

namespace {

// stride * n for n from least to most.
struct Step {
  int64_t stride, least, most;
};

constexpr int kMostSteps = 16;  // of both tensors

// In bytes: the dimensions of size > 1, and the bytes of an element as one more dimension.
struct Steps {
  std::array<Step, kMostSteps> step;
  int count = 0;

  void add(int64_t stride, int64_t least, int64_t most) {
    if (stride == 0 || least == most) return;
    for (int i = 0; i < count; ++i) {
      if (step[i].stride != stride) continue;
      step[i].least += least;
      step[i].most += most;
      return;
    }
    require(count < kMostSteps,
            "expected at most 15 different strides in two tensors whose memory ranges overlap");
    step[count++] = {stride, least, most};
  }
  void add(Tensor const& tensor, bool forward) {
    int64_t const width = int64_t(tensor.element_size());
    auto const of_index = [&](int64_t stride, int64_t size) {
      forward ? add(stride, 0, size - 1) : add(stride, 1 - size, 0);
    };
    for (int64_t i = 0; i < tensor.dim(); ++i) of_index(width * tensor.stride(i), tensor.size(i));
    of_index(1, width);
  }
  void sort() {
    std::sort(step.begin(), step.begin() + count,
              [](Step const& a, Step const& b) { return a.stride > b.stride; });
  }
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Whether the steps from `first` on can add up to `total`.
bool reaches(Steps const& steps, int first, int64_t total) {
  if (first == steps.count) return total == 0;
  int64_t lowest = 0, highest = 0;
  for (int i = first + 1; i < steps.count; ++i) {
    lowest += steps.step[i].stride * steps.step[i].least;
    highest += steps.step[i].stride * steps.step[i].most;
  }
  Step const& mine = steps.step[first];
  int64_t const least = std::max(mine.least, -floor_div(highest - total, mine.stride));
  int64_t const most = std::min(mine.most, floor_div(total - lowest, mine.stride));
  for (int64_t n = least; n <= most; ++n) {
    if (reaches(steps, first + 1, total - mine.stride * n)) return true;
  }
  return false;
}

bool share_memory(Named const& a, Named const& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  Steps steps;
  steps.add(*a.tensor, true);
  steps.add(*b.tensor, false);
  steps.sort();
  return reaches(steps, 0, int64_t(b.begin) - int64_t(a.begin));
}

// Whether, from the smallest stride on, each dimension steps over all elements of those before.
bool has_own_elements(Tensor const& tensor) {
  if (tensor.numel() == 0) return true;
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) dimensions.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t span = 1;
  for (auto const& [stride, size] : dimensions) {
    if (stride < span) return false;
    span += stride * (size - 1);
  }
  return true;
}

}  // namespace

Named::Named(char const* name, Tensor const& tensor) : name(name), tensor(&tensor) {
  if (tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += tensor.stride(i) * (tensor.size(i) - 1);
  begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  end = begin + uintptr_t(last + 1) * tensor.element_size();
}

Named::Named(char const* name, MaybeTensor const& tensor) : name(name) {
  if (tensor.has_value()) *this = Named(name, *tensor);
}

void require_apart(std::initializer_list<Named> written, std::initializer_list<Named> read) {
  auto const apart = [](Named const& mine, Named const& other) {
    require(!share_memory(mine, other), mine.name,
            ": expected memory not shared with other arguments, got memory shared with ",
            other.name);
  };
  for (auto mine = written.begin(); mine != written.end(); ++mine) {
    if (mine->tensor == nullptr) continue;
    require(has_own_elements(*mine->tensor), mine->name, ": expected elements that do not overlap");
    for (auto other = written.begin(); other != mine; ++other) apart(*mine, *other);
    for (Named const& other : read) apart(*mine, other);
  }
}

}  // namespace guild::binding
