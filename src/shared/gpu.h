// The GPU that the cost models assume: an H100 or H200.
#pragma once

namespace guild {

inline constexpr int kMultiprocessors = 132;

}  // namespace guild
