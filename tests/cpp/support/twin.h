// A step whose operands are bytes, run on two devices: what it leaves there is compared.
#pragma once
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "device.h"

namespace guild::test {

// The whole memory of one of a step's outputs: gaps between strides, and rows that nothing is
// promised for, hold what was there before.
struct Left {
  std::string name;
  bool floats;  // float32, whose NaNs may have any bits
  std::vector<std::byte> bytes;

  template <class T>
  std::vector<T> as() const {
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

// Operands of a step in the memory of one device. Null where there are no elements.
class Operands {
 public:
  explicit Operands(Device& device) : device_(device) {}

  template <class T>
  T const* in(std::vector<T> const& values) {
    return static_cast<T const*>(placed(values));
  }
  // Bytes of elements of a layer's type, as `packed` makes them.
  void const* in(std::vector<std::byte> const& bytes) { return in<std::byte>(bytes); }

  // Filled with 0xa7 before each run, or with what is to be added to.
  template <class T>
  T* out(char const* name, int64_t count) {
    return static_cast<T*>(output(name, std::is_same_v<T, float>, poison(count * sizeof(T))));
  }
  void* added_to(char const* name, std::vector<std::byte> const& start) {
    return output(name, false, start);
  }

  // Memory that the step works in, whose content is not compared.
  template <class T>
  T* scratch(int64_t count) {
    return static_cast<T*>(place(poison(count * sizeof(T))));
  }

  void reset();  // outputs to what they were made with
  std::vector<Left> left() const;

 private:
  struct Output {
    std::string name;
    bool floats;
    std::vector<std::byte> start;
    Bytes const* bytes;
  };

  static std::vector<std::byte> poison(int64_t bytes) {
    return std::vector<std::byte>(bytes, std::byte{0xa7});
  }
  template <class T>
  void* placed(std::vector<T> const& values) {
    auto const* const first = reinterpret_cast<std::byte const*>(values.data());
    return place({first, first + values.size() * sizeof(T)});
  }
  void* place(std::vector<std::byte> const& content);
  void* output(char const* name, bool floats, std::vector<std::byte> const& start);

  Device& device_;
  std::deque<Bytes> memory_;  // whose elements stay where they are
  std::vector<Output> outputs_;
};

// Arguments over operands on a device.
using Fill = std::function<AnyStep(Operands&)>;

// Runs the step twice on a device and expects the same bits, and nothing written past an output.
std::vector<Left> left_by(Device& device, Fill const& fill);

// The same on the device and on the CPU: equal bits, except those of NaN.
void expect_as_on_cpu(Device& device, Fill const& fill);

// Values of a layer's type as bytes.
std::vector<std::byte> packed(DType dtype, std::vector<double> const& values);

// Rows that are hard for quantisers, packed: normals of very different magnitudes and, here and
// there, a block of zeros, subnormals, numbers at the edges of the type, a NaN or an infinity.
std::vector<std::byte> awkward(DType dtype, int64_t rows, int64_t columns, uint64_t seed);
std::vector<std::byte> normal(DType dtype, int64_t rows, int64_t columns, uint64_t seed,
                              double scale = 1);

}  // namespace guild::test
