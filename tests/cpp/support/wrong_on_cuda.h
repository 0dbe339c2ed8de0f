// Calls that the CPU accepts and CUDA does not: a step, one thing of it made wrong, the error.
#pragma once
#include "wrong_call.h"

namespace guild::test {

alignas(16) inline char aligned_memory[64];

// The wrong calls of one step. The correct one is that of Calls in bfloat16 and aligned memory.
template <class Args>
class WrongOnCuda {
 public:
  WrongOnCuda(Args const& right, void (*run)(Args const&, cuda::Queue)) : right_(right), run_(run) {
    EXPECT_NO_THROW(check(right));
  }

  void expect(std::string const& message, std::function<void(Args&)> const& spoil) const {
    SCOPED_TRACE(message);
    Args args = right_;
    spoil(args);
    EXPECT_NO_THROW(check(args)) << "wrong on the CPU as well";
    try {
      run_(args, {});
      ADD_FAILURE() << "no error";
    } catch (Error const& error) {
      EXPECT_EQ(error.what(), message);
    }
  }

  void narrow(Args const& wide) const {
    expect("dtype: expected bfloat16 or float16 on CUDA, got float32", [&](Args& x) { x = wide; });
  }
  void hidden() const {
    expect("hidden: expected a multiple of 8 on CUDA, got 12",
           [](Args& x) { x.sizes.hidden = 12; });
  }
  void intermediate() const {
    expect("intermediate: expected a multiple of 8 on CUDA, got 4",
           [](Args& x) { x.sizes.intermediate = 4; });
  }

  // Of a pointer.
  template <class Of>
  void pointer(char const* name, Of of) const {
    char* const odd = aligned_memory + 2;
    expect(text_of(name, ": expected 16-byte aligned data on CUDA, got address ",
                   reinterpret_cast<uintptr_t>(odd)),
           [&](Args& x) { std::invoke(of, x) = odd; });
  }
  template <class Of>
  void address(char const* name, Of of) const {
    pointer(name, [=](Args& x) -> auto& { return std::invoke(of, x).data; });
  }
  template <class Of>
  void rows(char const* name, Of of) const {
    address(name, of);
    expect(text_of(name, ": expected rows a multiple of 8 elements apart on CUDA, got 20"),
           [&](Args& x) { std::invoke(of, x).stride = 20; });
  }
  template <class Of>
  void weight(char const* name, Of of) const {
    address(name, of);
    expect(text_of(name, ": expected one contiguous dimension on CUDA, got strides (128, 16, 2)"),
           [&](Args& x) { set_strides(std::invoke(of, x), 128, 16, 2); });
    expect(text_of(name, ": expected rows a multiple of 8 elements apart on CUDA, got 20"),
           [&](Args& x) { set_strides(std::invoke(of, x), 160, 20, 1); });
    expect(text_of(name, ": expected rows a multiple of 8 elements apart on CUDA, got 36"),
           [&](Args& x) { set_strides(std::invoke(of, x), 160, 1, 36); });
    expect(text_of(name, ": expected rows a multiple of 8 elements apart on CUDA, got 132"),
           [&](Args& x) { set_strides(std::invoke(of, x), 132, 16, 1); });
  }

 private:
  static void set_strides(ConstWeight& w, int64_t expert, int64_t out, int64_t in) {
    w.expert_stride = expert, w.out_stride = out, w.in_stride = in;
  }

  Args right_;
  void (*run_)(Args const&, cuda::Queue);
};

}  // namespace guild::test
