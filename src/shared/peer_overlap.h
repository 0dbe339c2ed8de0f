// How a layer over ranks divides its experts, so that it can begin while rows are on their way.
//
// Of e of a rank's experts, a share of about 1 - (1 - e / E)^K of all tokens has one, E being all
// ranks' experts. So the rows that few experts need are there soon, and while these are multiplied
// those of more experts arrive.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "guild/exchange.h"

namespace guild {

struct PeerLoad {
  int64_t ranks = 1, tokens = 0;           // of a rank
  int64_t experts = 1, top_k = 1;          // of this rank
  int64_t row_bytes = 0;                   // that travel for a token
  int64_t inner = 0, columns = 0;          // of the product, for a row
  double link_bytes = 320e3, ops = 600e6;  // in a microsecond: of a link, of the products

  double share(int64_t first) const {
    return 1 - std::pow(1 - double(first) / double(experts * ranks), double(top_k));
  }
  // Microseconds until the rows of the first experts are there.
  double travel(int64_t first) const {
    return double((ranks - 1) * tokens * row_bytes) * share(first) / link_bytes;
  }
  double product(int64_t count) const {
    double const rows = double(tokens * top_k) * double(count) / double(experts);
    return 2 * rows * double(inner) * double(columns) / ops;
  }
  // How many experts have their rows by then; at least one more than `served`.
  int64_t served_by(double time, int64_t served) const {
    int64_t least = served + 1, most = experts;
    while (least < most) {
      int64_t const middle = (least + most + 1) / 2;
      if (travel(middle) <= time) {
        least = middle;
      } else {
        most = middle - 1;
      }
    }
    return least;
  }
};

// One turn where it does not pay to divide the product.
inline PeerTurns turns_of(PeerLoad const& load) {
  constexpr double kCost = 5;  // microseconds of another launch and its last wave
  double const whole = load.travel(load.experts);
  PeerTurns best;
  double least = whole + load.product(load.experts);
  for (int64_t first = 1; first < load.experts; ++first) {
    // This much at least, and more for every later one.
    if (load.travel(first) + load.product(load.experts) + 2 * kCost >= least) break;
    PeerTurns turns;
    double end = load.travel(first) + load.product(first) + kCost;
    int64_t served = turns.until[0] = first;
    for (turns.count = 2;; ++turns.count) {
      if (turns.count == kMostTurns || whole <= end) break;
      int64_t const until = load.served_by(end, served);
      if (until == load.experts) break;
      turns.until[turns.count - 1] = until;
      end = std::max(end, load.travel(until)) + load.product(until - served) + kCost;
      served = until;
    }
    end = std::max(end, whole) + load.product(load.experts - served) + kCost;
    if (end < least) least = end, best = turns;
  }
  return best;
}

}  // namespace guild
