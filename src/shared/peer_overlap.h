// How an expert-parallel layer splits its products to overlap them with transfers: how many experts
// run first, while rows for the others arrive, and how many run last, while the sums of tokens that
// have none of these are sent back.
//
// About 1 - (1 - e / E)^K of all tokens have one of a rank's first e experts, where E is the number
// of all ranks' experts. The rows of these tokens are transferred while nothing else runs, the
// others while the products of the e experts run; the transfer time that these do not hide is
// exposed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace guild {

struct PeerLoad {
  int64_t ranks = 1, tokens = 0;           // of a rank
  int64_t experts = 1, top_k = 1;          // of this rank
  int64_t row_bytes = 0;                   // transferred per token
  int64_t inner = 0, columns = 0;          // K and N of the product
  double link_bytes = 350e3, ops = 600e6;  // per microsecond: bytes of a link, FLOPs of products

  double share(int64_t first) const {
    return 1 - std::pow(1 - double(first) / double(experts * ranks), double(top_k));
  }
  // Microseconds to transfer all rows.
  double travel() const {
    return double((ranks - 1) * tokens * row_bytes) * share(experts) / link_bytes;
  }
  double product(int64_t first) const {
    double const rows = double(tokens * top_k) * double(first) / double(experts);
    return 2 * rows * double(inner) * double(columns) / ops;
  }
  // Microseconds in which rows are transferred and nothing else runs.
  double exposed(int64_t first) const {
    double const before = travel() * share(first) / share(experts);
    return before + std::max(0., travel() - before - product(first));
  }
};

// How many experts to run first; all of them if splitting the product does not pay.
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
  static constexpr int kMultiprocessors = 40, kAll = 132;  // SMs that push beside products; all SMs
  static constexpr double kBytes = 25e3;  // that one SM reads and writes per microsecond
  static constexpr double kLeast = 60;    // least gain in microseconds: docs/measured/ranks.md
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

// How many experts to run last; 0 if sending some sums early does not pay.
inline int64_t last_experts(EarlySums const& sums) {
  int64_t best = 0;
  double least = sums.load.travel() - EarlySums::kLeast;
  for (int64_t last = 1; last < sums.load.experts; ++last) {
    if (double const time = sums.exposed(last); time < least) least = time, best = last;
  }
  return best;
}

}  // namespace guild
