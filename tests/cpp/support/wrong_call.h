// The correct calls of calls.h, each with one thing made wrong, and the errors that must follow.
//
// A test of one step is a table of its arguments: a line says what an argument must be, and stands
// for every wrong value of it. A requirement without a line here is one that nothing tests.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <sstream>
#include <string>

#include "calls.h"
#include "checks/check.h"
#include "checks/exchange.h"
#include "checks/float8_chunks.h"
#include "checks/microscaling.h"
#include "checks/peer_layer.h"
#include "checks/router_logits.h"

namespace guild::test {

template <class... Parts>
std::string text_of(Parts const&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// The wrong calls of one step. `of` is what picks an argument: &Step::field, or a function.
template <class Args>
class WrongCalls {
 public:
  using Spoil = std::function<void(Args&)>;

  WrongCalls(Args (Calls::*right)(), void (*on_cpu)(Args const&),
             void (*on_cuda)(Args const&, cuda::Queue))
      : right_(right), on_cpu_(on_cpu), on_cuda_(on_cuda) {
    Calls calls;
    EXPECT_NO_THROW(check((calls.*right)())) << "nothing is wrong with the call as it was made";
  }

  // What `spoil` changes is answered with the whole `message`, by both backends and by the check of
  // this very step, which comes before any work: a composite's own steps would notice too late.
  void expect(std::string const& message, Spoil const& spoil) const {
    expect_error(message, spoil, [](Args const& args) { check(args); });
    expect_error(message, spoil, on_cpu_);
    expect_on_cuda(message, spoil);
  }
  // The same for what only the CUDA backend requires.
  void expect_on_cuda(std::string const& message, Spoil const& spoil) const {
    if (!cuda::built()) return;
    expect_error(message, spoil, [this](Args const& args) { on_cuda_(args, {}); });
  }

  template <class Of>
  void size(char const* name, Of of, int64_t least, int64_t most) const {
    for (int64_t const wrong : {least - 1, most + 1}) {
      expect(text_of(name, ": expected ", least, " to ", most, ", got ", wrong),
             [&](Args& x) { std::invoke(of, x) = wrong; });
    }
  }

  template <class Of>
  void pointer(char const* name, Of of) const {
    expect(text_of(name, ": expected a pointer, got null"),
           [&](Args& x) { std::invoke(of, x) = nullptr; });
  }

  template <class Of>
  void dtype(char const* name, Of of) const {
    expect(text_of(name, ": expected 0 (float32), 1 (bfloat16), 2 (float16) or 3 (float64), got 7"),
           [&](Args& x) { std::invoke(of, x) = DType(7); });
  }
  // Of scores, which are never narrow.
  template <class Of>
  void score_dtype(char const* name, Of of) const {
    expect(text_of(name, ": expected float32 or float64, got bfloat16"),
           [&](Args& x) { std::invoke(of, x) = DType::bfloat16; });
  }

  // What is said of a stride with which offsets need more than 64 bits.
  static constexpr int64_t kFarStride = int64_t(1) << 62;
  static std::string far(int64_t count, int64_t rows, int64_t columns) {
    return text_of(": expected strides that put ", count, " x ", rows, " x ", columns,
                   " elements less than 2^59 apart, got ");
  }

  // Of rows that may be absent, only the stride is checked.
  template <class Of>
  void optional_rows(char const* name, Of of, int64_t width) const {
    expect(text_of(name, ": expected a row stride of at least its width ", width,
                   ", or 0 for packed rows, got ", width - 1),
           [&](Args& x) { std::invoke(of, x).stride = width - 1; });
  }
  template <class Of>
  void rows(char const* name, Of of, int64_t count, int64_t width) const {
    expect(text_of(name, ": expected ", count, " rows of ", width, ", got null"),
           [&](Args& x) { std::invoke(of, x).data = nullptr; });
    optional_rows(name, of, width);
    if (count > 1) {
      expect(text_of(name, far(1, count, width), "(0, ", kFarStride, ", 1)"),
             [&](Args& x) { std::invoke(of, x).stride = kFarStride; });
    }
  }

  // A weight of the layer: experts x out x in.
  template <class Of>
  void weight(char const* name, Of of, int64_t out, int64_t in) const {
    expect(text_of(name, ": expected 2 matrices of ", out, " x ", in, ", got null"),
           [&](Args& x) { std::invoke(of, x).data = nullptr; });
    strides(name, of, ": expected strides of at least 0", {-1, in, 1});
    strides(name, of, ": expected strides of at least 0", {out * in, -1, 1});
    strides(name, of, ": expected strides of at least 0", {out * in, in, -1});
    auto const expect_far = [&](Strides const& s) {
      expect(text_of(name, far(2, out, in), "(", s.expert, ", ", s.out, ", ", s.in, ")"),
             setting(of, s));
    };
    expect_far({kFarStride, in, 1});
    expect_far({out * in, kFarStride, 1});
  }
  // One that is written: its elements must not overlap.
  template <class Of>
  void output_weight(char const* name, Of of, int64_t out, int64_t in) const {
    std::string const apart =
        text_of(": expected strides of matrices that do not overlap, 2 of ", out, " x ", in);
    strides(name, of, apart, {out * in, in - 1, 1});
    strides(name, of, apart, {out * in, 1, out - 1});
    strides(name, of, apart, {out * in, in, 0});
    strides(name, of, apart, {0, in, 1});
    strides(name, of, apart, {out * in, in, 2});  // a row's second half is the next row's first
    strides(name, of, apart, {in, in, 1});        // and so are matrices
  }

  // Sizes of a layer.
  void sizes() const {
    size("tokens", [](Args& x) -> auto& { return x.sizes.tokens; }, 0, 2147483647);
    size("hidden", [](Args& x) -> auto& { return x.sizes.hidden; }, 1, 1073741760);
    size("intermediate", [](Args& x) -> auto& { return x.sizes.intermediate; }, 1, 1073741760);
    size("experts", [](Args& x) -> auto& { return x.sizes.experts; }, 1, 4096);
    size("top_k", [](Args& x) -> auto& { return x.sizes.top_k; }, 1, 4096);
    expect("tokens * top_k: expected 0 to 2147483647, got 4294967296",
           [](Args& x) { x.sizes.tokens = int64_t(1) << 30, x.sizes.top_k = 4; });
    expect("slots: expected 0 to 2147483647, got 2147483648",
           [](Args& x) { x.sizes.slots = int64_t(1) << 31; });
    size("room", [](Args& x) -> auto& { return x.sizes.room; }, -1, 2147483647);
  }

  // A work buffer, which begins at a multiple of 16.
  template <class Of>
  void workspace(char const* name, Of of, int64_t bytes) const {
    expect(text_of(name, ": expected ", bytes, " bytes, got null"),
           [&](Args& x) { std::invoke(of, x) = nullptr; });
    expect(text_of(name, ": expected an address that 16 divides, got one that leaves 4"),
           [&](Args& x) {
             void*& memory = std::invoke(of, x);
             memory = static_cast<char*>(memory) + 4;
           });
  }

  // Lists of any length; slots and offsets are picked separately.
  template <class Slots, class Offsets>
  void lists(Slots slots, Offsets offsets) const {
    static int32_t somewhere;
    expect("token_offsets: expected null without slots, got a pointer",
           [&](Args& x) { std::invoke(offsets, x) = &somewhere; });
    expect("token_offsets: expected a pointer with slots, got null",
           [&](Args& x) { std::invoke(slots, x) = 8; });
    expect("slots: expected -1 to 2147483647, got -2",
           [&](Args& x) { std::invoke(slots, x) = -2; });
  }

 private:
  struct Strides {
    int64_t expert, out, in;
  };

  template <class Of>
  void strides(char const* name, Of of, std::string const& expected, Strides const& s) const {
    expect(text_of(name, expected, ", got (", s.expert, ", ", s.out, ", ", s.in, ")"),
           setting(of, s));
  }
  template <class Of>
  static Spoil setting(Of of, Strides const& s) {
    return [=](Args& x) {
      auto& weight = std::invoke(of, x);
      weight.expert_stride = s.expert, weight.out_stride = s.out, weight.in_stride = s.in;
    };
  }

  template <class Run>
  void expect_error(std::string const& message, Spoil const& spoil, Run run) const {
    SCOPED_TRACE(message);
    Calls calls;
    Args args = (calls.*right_)();
    spoil(args);
    try {
      run(args);
      ADD_FAILURE() << "no error";
    } catch (Error const& error) {
      EXPECT_EQ(error.what(), message);
    }
  }

  Args (Calls::*right_)();
  void (*on_cpu_)(Args const&);
  void (*on_cuda_)(Args const&, cuda::Queue);
};

}  // namespace guild::test
