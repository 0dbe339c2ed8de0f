// How the stable counting sort of slots is cut into chunks: one histogram a chunk.
#pragma once
#include <cstdint>

namespace guild {

// Slots a thread block sorts; the chunks' histograms (chunks, E) are the sort's workspace.
inline constexpr int64_t kSortChunk = 1024;

constexpr int64_t sort_chunks(int64_t slots) { return (slots + kSortChunk - 1) / kSortChunk; }

}  // namespace guild
