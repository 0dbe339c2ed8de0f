// How a layer over ranks divides its products, so that rows travel meanwhile: how many experts it
// begins with while rows for the others are still in transit, and how many it ends with while the
// sums of tokens that have none of these are sent back.
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

// The sums that can be sent while both products of the last experts run: those of tokens that have
// none of these. A token with none of the last n experts has K of the other E - n.
struct EarlySums {
  static constexpr int kMultiprocessors = 40, kAll = 132;  // that push beside products; of a GPU
  static constexpr double kBytes = 25e3;  // that one of them reads and writes in a microsecond
  static constexpr double kLeast = 60;    // microseconds; less is not seen: docs/measured/ranks.md
  PeerLoad load;                          // of the up projection
  int64_t intermediate = 0;

  double without(int64_t last) const { return 1 - load.share(last); }
  // The share of all sums.
  double early(int64_t last) const {
    return (without(last) - without(load.experts)) / load.share(load.experts);
  }
  double products(int64_t last) const {
    PeerLoad down = load;
    down.inner = intermediate, down.columns = load.inner;
    return load.product(last) + down.product(last);
  }
  double push(int64_t last) const {
    double const all = double(load.experts * load.ranks), tokens = double(load.ranks * load.tokens);
    double const rows = double(load.top_k) * double(load.experts - last) / (all - double(last));
    double const moved = tokens * (without(last) * (1 + rows) - without(load.experts));
    double const copied = moved * double(load.row_bytes) / (kMultiprocessors * kBytes);
    return std::max(copied, load.travel() * early(last));
  }
  // Microseconds that sending takes longer than the products.
  double exposed(int64_t last) const {
    double const pushed = push(last), run = products(last);
    double const both = std::max(pushed, run + pushed * kMultiprocessors / kAll);
    return both - run + load.travel() * (1 - early(last));
  }
};

// 0 where it does not pay to send any sums before the others.
inline int64_t last_experts(EarlySums const& sums) {
  int64_t best = 0;
  double least = sums.load.travel() - EarlySums::kLeast;
  for (int64_t last = 1; last < sums.load.experts; ++last) {
    if (double const time = sums.exposed(last); time < least) least = time, best = last;
  }
  return best;
}

}  // namespace guild
