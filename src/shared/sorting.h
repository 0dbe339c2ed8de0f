// How the stable counting sort of slots is cut into chunks: one thread block and one histogram
// each.
#pragma once
#include <cstdint>

namespace guild {

// At most kMostSortChunks, whatever the number of slots: every block adds up the histograms of all
// of them, (chunks, E) int32, which are the sort's workspace. 128 fit the multiprocessors of one
// GPU at a time.
inline constexpr int64_t kMostSortChunks = 128;
inline constexpr int64_t kSortThreads = 512;  // of a block

// Slots of a chunk: a multiple of kSortThreads.
constexpr int64_t sort_chunk_slots(int64_t slots) {
  int64_t const even = (slots + kMostSortChunks - 1) / kMostSortChunks;
  return (even + kSortThreads - 1) / kSortThreads * kSortThreads;
}

constexpr int64_t sort_chunks(int64_t slots) {
  return slots == 0 ? 0 : (slots + sort_chunk_slots(slots) - 1) / sort_chunk_slots(slots);
}

}  // namespace guild
