// How the router's product is split: the sums over H into chunks, which depend on H alone and
// determine the logits' bits; a GPU's work into thread blocks, which do not affect them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "shared/ceil_div.h"
#include "shared/gpu.h"

namespace guild {

// A chunk of a sum over H is summed in order by one accumulator; then the chunks are added in
// order.
inline constexpr int64_t kMostRouterChunk = 1024;
constexpr int64_t router_chunk(int64_t hidden) { return hidden <= 4096 ? 512 : kMostRouterChunk; }
constexpr int64_t router_chunks(int64_t hidden) {
  return std::max<int64_t>(1, ceil_div(hidden, router_chunk(hidden)));
}

// Tokens and experts per thread block. split (split-K): a block sums one chunk, otherwise all.
struct RouterTile {
  int tokens, experts;
  bool split;
};

inline constexpr RouterTile kRouterTiles[] = {
    {64, 16, true},   {64, 32, true},   {64, 64, true},   {128, 32, true},  {128, 64, true},
    {64, 128, true},  {128, 128, true}, {64, 16, false},  {64, 32, false},  {64, 64, false},
    {128, 32, false}, {128, 64, false}, {64, 128, false}, {128, 128, false}};

// Up to this many experts the router can add the chunks itself.
inline constexpr int64_t kMostSplitExperts = 512;

// Whether the kernel for few tokens applies. Its tile is the first of kRouterTiles, and its grid
// has one block along y per chunk.
constexpr bool few_for_router(int64_t tokens, int64_t hidden, int64_t experts) {
  return tokens <= kRouterTiles[0].tokens && hidden % 64 == 0 && experts <= kMostSplitExperts &&
         router_chunks(hidden) <= kMostBlocksAlongY;
}

// Expected microseconds of the product on an H200: the longest of an SM's loads, its shared-memory
// traffic, all loads from L2 and all reads from memory, plus, if split, the chunks' sums through
// L2. The constants are fitted so that the choice is best among the measured times of all tiles on
// the presets of `guild bench`, 256 to 32,768 tokens.
inline double expected_router_time(RouterTile const& tile, int64_t tokens, int64_t hidden,
                                   int64_t experts) {
  constexpr double kPort = 89e3, kShared = 139e3, kCache = 8.9e6, kMemory = 2.86e6;
  constexpr double kPartRate = 4.34e6, kTile = 0.28, kSplit = 0.29;
  int64_t const chunks = tile.split ? router_chunks(hidden) : 1;
  int64_t const tiles = ceil_div(tokens, tile.tokens) * ceil_div(experts, tile.experts) * chunks;
  double const depth = double(tile.split ? std::min(hidden, router_chunk(hidden)) : hidden);
  double const loaded =
      2 * depth *
      double(std::min<int64_t>(tokens, tile.tokens) + std::min<int64_t>(experts, tile.experts));
  double const read = 2 * depth * (tile.tokens + tile.tokens / 64 * tile.experts);
  double const written = 2 * depth * (tile.tokens + tile.experts);
  double const tile_time = std::max(loaded / kPort, (read + written) / kShared) + kTile;
  double const waves = double(ceil_div(tiles, kMultiprocessors));
  double const memory = 2 * double(hidden) * double(tokens + experts) / kMemory;
  double const parts = 8 * double(chunks * tokens) * double(experts) / kPartRate + kSplit;
  return std::max({waves * tile_time, double(tiles) * loaded / kCache, memory}) +
         (tile.split ? parts : 0);
}

// The tile with the least expected time. For few tokens it is the first, which is split: without
// split there would be too few blocks, each reading whole rows of the weight.
inline RouterTile choose_router_tile(int64_t tokens, int64_t hidden, int64_t experts) {
  if (few_for_router(tokens, hidden, experts)) return kRouterTiles[0];
  RouterTile best = kRouterTiles[7];  // the first that is not split, which always serves
  double least = expected_router_time(best, tokens, hidden, experts);
  for (RouterTile const& tile : kRouterTiles) {
    if (tile.split && experts > kMostSplitExperts) continue;
    double const time = expected_router_time(tile, tokens, hidden, experts);
    if (time < least) best = tile, least = time;
  }
  return best;
}

}  // namespace guild
