// How the stable counting sort of slots is cut into chunks: one thread block and one histogram
// each.
#pragma once
#include <cstdint>

namespace guild {

// At most kMostSortChunks, whatever the number of slots: they fit the multiprocessors of one GPU at
// a time. Clusters of blocks add up their histograms, then every block those of all clusters.
inline constexpr int64_t kMostSortChunks = 128;
inline constexpr int64_t kSortCluster = 8;    // blocks of a cluster
inline constexpr int64_t kSortThreads = 512;  // of a block

// Slots of a chunk: a multiple of kSortThreads.
constexpr int64_t sort_chunk_slots(int64_t slots) {
  int64_t const even = (slots + kMostSortChunks - 1) / kMostSortChunks;
  return (even + kSortThreads - 1) / kSortThreads * kSortThreads;
}

constexpr int64_t sort_chunks(int64_t slots) {
  return slots == 0 ? 0 : (slots + sort_chunk_slots(slots) - 1) / sort_chunk_slots(slots);
}

constexpr int64_t sort_clusters(int64_t slots) {
  return (sort_chunks(slots) + kSortCluster - 1) / kSortCluster;
}

// Of the workspace: a histogram of each cluster and one of each of its blocks.
constexpr int64_t sort_histograms(int64_t slots) {
  return sort_clusters(slots) * (1 + kSortCluster);
}

}  // namespace guild
