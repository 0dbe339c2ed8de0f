// Chunks of the stable counting sort of slots: one thread block and one histogram each.
#pragma once
#include <cstdint>

#include "shared/ceil_div.h"

namespace guild {

// At most kMostSortChunks for any number of slots, so that all blocks run at the same time on one
// GPU. Each cluster of blocks adds up its histograms; then every block adds up those of all
// clusters.
inline constexpr int64_t kMostSortChunks = 128;
inline constexpr int kSortCluster = 8;                                    // blocks of a cluster
inline constexpr int kSortThreads = 512, kSortWarps = kSortThreads / 32;  // of a block

// Slots of a chunk: a multiple of kSortThreads.
constexpr int64_t sort_chunk_slots(int64_t slots) {
  int64_t const even = ceil_div(slots, kMostSortChunks);
  return ceil_div(even, kSortThreads) * kSortThreads;
}

constexpr int64_t sort_chunks(int64_t slots) {
  return slots == 0 ? 0 : ceil_div(slots, sort_chunk_slots(slots));
}

constexpr int64_t sort_clusters(int64_t slots) {
  return ceil_div(sort_chunks(slots), kSortCluster);
}

// Histograms in the workspace: one per cluster and one per block.
constexpr int64_t sort_histograms(int64_t slots) {
  return sort_clusters(slots) * (1 + kSortCluster);
}

}  // namespace guild
