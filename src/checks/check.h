// Checks of every step's arguments, called once, by the public function. They throw Error with the
// argument's name, its value and what was expected.
//
// Shared by both backends; what only CUDA requires (16-bit types, alignment) is in
// src/cuda/alignment.h.
#pragma once
#include "guild/error.h"
#include "guild/float8.h"
#include "guild/steps.h"

namespace guild {

inline constexpr int64_t kMostExperts = 4096;
inline constexpr int64_t kMostTile = 1 << 20;  // rows
inline constexpr int64_t kMostGroups = 32;     // of a router: a bit each

void check(Route const& x);
void check(RouterGradient const& x);
void check(TokenRounding const& x);
void check(BalanceSums const& x);
void check(BalanceGradient const& x);
void check(Sort const& x);
void check(UpProjection const& x);
void check(DownProjection const& x);
void check(Combine const& x);
void check(DownGradient const& x);
void check(ScoreGradient const& x);
void check(UpGradient const& x);
void check(UpWeightGradient const& x);
void check(DownWeightGradient const& x);
void check(BiasGradient const& x);
void check(GroupedGemm const& x);
void check(MoeForward const& x);
void check(MoeBackward const& x);
void check(MoeWeightGradients const& x);
void check(QuantizeRows const& x);
void check(QuantizeWeights const& x);
void check(ScaledGroupedGemm const& x);
void check(ScaledUp const& x);
void check(ScaledDownGradient const& x);

}  // namespace guild
