// Memory on the CPU or on the GPU, kept as simple as the example allows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

enum class Place { cpu, gpu };

// Whether there is a GPU that Guild can use; otherwise prints why not.
bool has_gpu();

// Bytes on the CPU or GPU, freed with the last copy of the pointer.
std::shared_ptr<void> allocate(Place place, int64_t bytes);
void copy_in(Place place, void* to, void const* from, int64_t bytes);
void copy_out(Place place, void* to, void const* from, int64_t bytes);

// `count` elements of T.
template <class T>
class Array {
 public:
  Array(Place place, int64_t count)
      : place_(place), count_(count), data_(allocate(place, count * int64_t(sizeof(T)))) {}
  Array(Place place, std::vector<T> const& values) : Array(place, int64_t(values.size())) {
    copy_in(place, data(), values.data(), bytes());
  }
  T* data() const { return static_cast<T*>(data_.get()); }
  std::vector<T> values() const {
    std::vector<T> out(count_);
    copy_out(place_, out.data(), data(), bytes());
    return out;
  }

 private:
  int64_t bytes() const { return count_ * int64_t(sizeof(T)); }

  Place place_;
  int64_t count_;
  std::shared_ptr<void> data_;
};
