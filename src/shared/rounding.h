// How many rows an expert gets when its count is rounded to whole tiles. Host and device.
//
// SonicMoE, arXiv:2512.14080 (token rounding).
#pragma once
#include <cstdint>

#include "guild/steps.h"
#include "shared/host_device.h"

namespace guild {

// 32 random bits of an expert, from a counter (Steele et al., SplitMix64).
GUILD_HD uint32_t random_bits(uint64_t seed, uint64_t expert) {
  uint64_t z = seed + (expert + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return uint32_t((z ^ z >> 31) >> 32);
}

// An expert's count rounded to a multiple of `tile`. before: the sum of the counts of the experts
// before it; `balanced` rounds this running sum, so that the total changes by at most half a tile.
GUILD_HD int64_t rounded_count(Rounding rounding, int64_t tile, int64_t count, int64_t before,
                               uint64_t seed, int64_t expert) {
  int64_t const rest = count % tile, down = count - rest, up = rest == 0 ? count : down + tile;
  switch (rounding) {
    case Rounding::nearest:
      return 2 * rest >= tile ? up : down;
    case Rounding::up:
      return up;
    case Rounding::down:
      return down;
    case Rounding::stochastic:
      return uint64_t(random_bits(seed, uint64_t(expert))) * uint64_t(tile) < uint64_t(rest) << 32
                 ? up
                 : down;
    case Rounding::balanced: {
      int64_t const half = tile / 2;
      return ((before + count + half) / tile - (before + half) / tile) * tile;
    }
  }
  return count;
}

// How an expert reaches its rounded count. It keeps the `select` best of the tokens that chose it
// or, with `adds`, keeps all of these and adds the `select` best of the other tokens.
struct RoundingTarget {
  int32_t select;
  int32_t adds;        // 0 or 1
  int32_t candidates;  // number of tokens to select from
};
GUILD_HD RoundingTarget rounding_target(int64_t count, int64_t rounded, int64_t tokens) {
  if (rounded <= count) return {int32_t(rounded), 0, int32_t(count)};
  int64_t const others = tokens > count ? tokens - count : 0, more = rounded - count;
  return {int32_t(more < others ? more : others), 1, int32_t(others)};
}

// The key by which an expert ranks tokens: log p for softmax; for sigmoid and sqrt_softplus the
// logit, which has the same order as p. top and log_sum: the token's largest logit and the log of
// its sum of exp(logit - top), both 0 except for softmax.
template <class F>
GUILD_HD F rounding_key(F logit, F top, F log_sum) {
  return (logit - top) - log_sum;
}

}  // namespace guild
