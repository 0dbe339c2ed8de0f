// GPU limits and sizes that host code needs, too.
#pragma once
#include <cstdint>

namespace guild {

// Of the GPU that the cost models assume: an H100 or H200.
inline constexpr int kMultiprocessors = 132;

// The most blocks of a launch along y and z. CUDA C++ Programming Guide, "Compute Capabilities".
inline constexpr int64_t kMostBlocksAlongY = 65535;

}  // namespace guild
