// Divides a workspace into its parts; the same code computes its size.
#pragma once
#include <cstddef>
#include <cstdint>

#include "guild/error.h"

namespace guild {

inline constexpr uintptr_t kWorkspaceAlignment = 16;  // bytes, of a buffer's beginning

// Divides a buffer into parts that begin at multiples of 256 bytes from its beginning; with a null
// base it only counts bytes.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}
  // A part whose size in bytes is the product of the factors.
  template <class... Factors>
  void* take(Factors... factors) {
    void* const part = base_ == nullptr ? nullptr : base_ + used_;
    int64_t bytes = 1, end = 0;
    bool fits = (!__builtin_mul_overflow(bytes, int64_t(factors), &bytes) && ...);
    fits = fits && !__builtin_add_overflow(bytes, int64_t(255), &bytes);
    fits = fits && !__builtin_add_overflow(used_, bytes / 256 * 256, &end);
    require(fits, "workspace: expected sizes that need fewer than 2^63 bytes");
    used_ = end;
    return part;
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

}  // namespace guild
