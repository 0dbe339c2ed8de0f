// How many experts a layer over ranks begins with while rows for the others are still in transit.
//
// A share of about 1 - (1 - e / E)^K of all tokens has one of a rank's first e experts, where E is
// the number of all ranks' experts. The rows of these tokens travel while nothing else runs. The
// others travel while the products of the e experts run; transfer time not hidden by these is
// exposed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace guild {

struct PeerLoad {
  int64_t ranks = 1, tokens = 0;           // of a rank
  int64_t experts = 1, top_k = 1;          // of this rank
  int64_t row_bytes = 0;                   // that travel for a token
  int64_t inner = 0, columns = 0;          // of the product, for a row
  double link_bytes = 350e3, ops = 600e6;  // in a microsecond: of a link, of the products

  double share(int64_t first) const {
    return 1 - std::pow(1 - double(first) / double(experts * ranks), double(top_k));
  }
  // Microseconds that the transfer of all rows takes.
  double travel() const {
    return double((ranks - 1) * tokens * row_bytes) * share(experts) / link_bytes;
  }
  double product(int64_t first) const {
    double const rows = double(tokens * top_k) * double(first) / double(experts);
    return 2 * rows * double(inner) * double(columns) / ops;
  }
  // Microseconds in which rows travel and nothing else runs.
  double exposed(int64_t first) const {
    double const before = travel() * share(first) / share(experts);
    return before + std::max(0., travel() - before - product(first));
  }
};

// All experts where it does not pay to divide the product.
inline int64_t first_experts(PeerLoad const& load) {
  constexpr double kCost = 10;  // microseconds of another launch and its last wave
  int64_t best = load.experts;
  double least = load.travel() - kCost;
  for (int64_t first = 1; first < load.experts; ++first) {
    if (double const time = load.exposed(first); time < least) least = time, best = first;
  }
  return best;
}

}  // namespace guild
