// The conditions that check() is built from: sizes, element types, pointers, rows, weights.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "checks/check.h"
#include "compose.h"
#include "shared/workspace.h"

namespace guild {

// Row and column counts are int32 in the kernels and the index arrays, as is the sum of two column
// counts that are rounded up to 64.
inline constexpr int64_t kMostRows = (int64_t(1) << 31) - 1;
inline constexpr int64_t kMostColumns = (int64_t(1) << 30) - 64;
// The largest distance, in elements, from the first element of a tensor to its last.
inline constexpr int64_t kMostReach = int64_t(1) << 59;

inline void check_size(int64_t size, int64_t least, int64_t most, char const* name) {
  require(size >= least && size <= most, name, ": expected ", least, " to ", most, ", got ", size);
}

inline void check_sizes(Sizes const& s) {
  check_size(s.tokens, 0, kMostRows, "tokens");
  check_size(s.hidden, 1, kMostColumns, "hidden");
  check_size(s.intermediate, 1, kMostColumns, "intermediate");
  check_size(s.experts, 1, kMostExperts, "experts");
  check_size(s.top_k, 1, kMostExperts, "top_k");
  check_size(s.slot_count(), 0, kMostRows, s.slots < 0 ? "tokens * top_k" : "slots");
  check_size(s.room, -1, kMostRows, "room");
}

// The most sequences that tokens can be cut into. Without tokens all of them are empty.
inline int64_t most_sequences(int64_t tokens) { return tokens == 0 ? kMostRows : tokens; }

// Lists of any length come with the number of their slots.
inline void check_lists(int64_t slots, int32_t const* token_offsets) {
  require((slots < 0) == (token_offsets == nullptr), "token_offsets: expected ",
          slots < 0 ? "null without slots, got a pointer" : "a pointer with slots, got null");
  check_size(slots, -1, kMostRows, "slots");
}

inline char const* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float16:
      return "float16";
    case DType::float64:
      return "float64";
  }
  return "no element type";
}

inline void check_dtype(DType dtype, char const* name) {
  require(int(dtype) >= 0 && int(dtype) <= int(DType::float64), name,
          ": expected 0 (float32), 1 (bfloat16), 2 (float16) or 3 (float64), got ", int(dtype));
}

inline void check_gradient_dtype(DType dtype, DType input, char const* name) {
  require(dtype == input || dtype == DType::float32, name, ": expected ",
          input == DType::float32 ? "" : name_of(input), input == DType::float32 ? "" : " or ",
          "float32, got ", name_of(dtype));
}

inline void check_score_dtype(DType dtype, char const* name) {
  require(dtype == DType::float32 || dtype == DType::float64, name,
          ": expected float32 or float64, got ", name_of(dtype));
}

inline void check_pointer(void const* data, bool needed, char const* name) {
  require(data != nullptr || !needed, name, ": expected a pointer, got null");
}

// Requires an address that is a multiple of `unit`. name: the parts of its name in the error.
template <class... Name>
void check_address(void const* data, uintptr_t unit, Name const&... name) {
  uintptr_t const past = uintptr_t(data) % unit;
  require(past == 0, name..., ": expected an address that ", unit, " divides, got one that leaves ",
          past);
}

inline void check_workspace(void const* data, int64_t bytes, char const* name = "workspace") {
  require(data != nullptr || bytes == 0, name, ": expected ", bytes, " bytes, got null");
  check_address(data, kWorkspaceAlignment, name);
}

// One dimension of a tensor with strides.
struct Dimension {
  int64_t size, stride;
};

// Throws if the last element is so far from the first that an offset, in elements or in bytes, may
// overflow 64 bits. No memory is that large.
inline void check_reach(std::array<Dimension, 3> dimensions, char const* name) {
  __int128 reach = 0;
  for (auto const& [size, stride] : dimensions) {
    if (size <= 0) return;
    reach += __int128(size - 1) * stride;
  }
  auto const& [outer, rows, columns] = dimensions;
  require(reach < kMostReach, name, ": expected strides that put ", outer.size, " x ", rows.size,
          " x ", columns.size, " elements less than 2^59 apart, got (", outer.stride, ", ",
          rows.stride, ", ", columns.stride, ")");
}

// Whether no two elements share an address: taken from the smallest stride to the largest, each
// dimension steps over everything that the ones before it reach.
inline bool lie_apart(std::array<Dimension, 3> dimensions) {
  std::ranges::sort(dimensions, {}, &Dimension::stride);
  __int128 reach = 0;
  for (auto const& [size, stride] : dimensions) {
    if (size == 0) return true;
  }
  for (auto const& [size, stride] : dimensions) {
    if (size == 1) continue;
    if (stride <= reach) return false;
    reach += __int128(size - 1) * stride;
  }
  return true;
}

// The dimension over matrices. With a list of positions (expert_at), `stride` is only a unit of
// distance, and the number of matrices says nothing about how far they reach.
inline Dimension matrices(int64_t count, int64_t stride, int32_t const* at) {
  return {at == nullptr || stride == 0 ? count : 1, stride};
}

inline void check_optional_rows(ConstRows const& rows, int64_t count, int64_t width,
                                char const* name) {
  require(rows.stride == 0 || rows.stride >= width, name,
          ": expected a row stride of at least its width ", width, ", or 0 for packed rows, got ",
          rows.stride);
  if (rows.data == nullptr) return;
  check_reach({{{1, 0}, {count, rows.stride == 0 ? width : rows.stride}, {width, 1}}}, name);
}

inline void check_rows(ConstRows const& rows, int64_t count, int64_t width, char const* name) {
  require(rows.data != nullptr || count == 0, name, ": expected ", count, " rows of ", width,
          ", got null");
  check_optional_rows(rows, count, width, name);
}

// An output's elements must not overlap; an input may repeat itself (stride 0).
inline void check_weight(ConstWeight const& w, int64_t experts, int64_t out, int64_t in,
                         char const* name, bool output) {
  require(w.data != nullptr, name, ": expected ", experts, " matrices of ", out, " x ", in,
          ", got null");
  require(w.expert_stride >= 0 && w.out_stride >= 0 && w.in_stride >= 0, name,
          ": expected strides of at least 0, got (", w.expert_stride, ", ", w.out_stride, ", ",
          w.in_stride, ")");
  std::array<Dimension, 3> const places{
      {matrices(experts, w.expert_stride, w.expert_at), {out, w.out_stride}, {in, w.in_stride}}};
  check_reach(places, name);
  if (!output) return;
  require(lie_apart(places), name, ": expected strides of matrices that do not overlap, ", experts,
          " of ", out, " x ", in, ", got (", w.expert_stride, ", ", w.out_stride, ", ", w.in_stride,
          ")");
}

inline int64_t width(Sizes const& s, bool gated) { return s.intermediate * (gated ? 2 : 1); }

// How many rows x or dout has: one per token where row_token is given, else one per sorted row.
inline int64_t input_rows(Sizes const& s, Routing const& routing) {
  return routing.row_token == nullptr ? s.rows() : s.tokens;
}

inline void check_layer(Sizes const& s, DType dtype, Routing const& routing) {
  check_sizes(s);
  check_dtype(dtype, "dtype");
  check_pointer(routing.offsets, true, "routing.offsets");
}

// 0 or a normal number of float32, in which routers and activations mostly compute.
inline bool is_float32(double x) {
  return x == 0 || (std::abs(x) >= std::numeric_limits<float>::min() &&
                    std::abs(x) <= std::numeric_limits<float>::max());
}

// Requires slot_row and row_token to be given together, or neither.
inline void check_places(Sizes const& s, Routing const& routing) {
  check_lists(s.slots, routing.token_offsets);
  bool const slots = has_slots(routing);
  check_pointer(routing.slot_row, slots && s.slot_count() > 0, "routing.slot_row");
  check_pointer(routing.row_token, slots && s.rows() > 0, "routing.row_token");
  require(slots || routing.row_token == nullptr,
          "routing.row_token: expected null without slot_row, got a pointer");
}

inline void check_activation(Activation const& a, DType dtype) {
  auto const kind = int(a.kind);
  bool const wide = dtype == DType::float64;
  char const* const range = wide ? "" : " in float32's normal range";
  auto const fits = [wide](double x) { return std::isfinite(x) && (wide || is_float32(x)); };
  require(kind >= 0 && kind <= int(Activation::Kind::relu_squared),
          "activation.kind: expected 0 to 4, got ", kind);
  require(fits(a.alpha), "activation.alpha: expected a finite number", range, ", got ", a.alpha);
  require(a.limit > 0 && (std::isinf(a.limit) || fits(a.limit)),
          "activation.limit: expected a positive number", range, ", got ", a.limit);
  require(fits(a.up_offset), "activation.up_offset: expected a finite number", range, ", got ",
          a.up_offset);
}

inline void check_order(GateUp order) {
  require(order == GateUp::concatenated || order == GateUp::interleaved,
          "order: expected 0 (concatenated) or 1 (interleaved), got ", int(order));
}

}  // namespace guild
