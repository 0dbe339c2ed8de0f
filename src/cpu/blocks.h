// How the CPU backend splits a step into blocks of work and distributes them over threads.
//
// A block is computed by one thread and its size depends on the arguments alone, so results have
// the same bits for any number of threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

#include "guild/types.h"
#include "shared/tiles.h"

namespace guild::cpu {

// A block's rows of one expert, its output columns, and the part of a long sum that is loaded at a
// time: large enough for an efficient matrix product, small enough for the L2 cache.
inline constexpr int64_t kBlockRows = 128, kBlockColumns = 256, kBlockInner = 512;

struct Span {
  int64_t first, count;
};

// [0, size) in pieces of `step`.
inline std::vector<Span> spans(int64_t size, int64_t step) {
  std::vector<Span> all;
  for (int64_t i = 0; i < size; i += step) all.push_back({i, std::min(step, size - i)});
  return all;
}

struct Block {
  int64_t expert;
  Span rows;
};

// The rows of every group.
inline std::vector<Block> group_rows(Groups const& groups) {
  std::vector<Block> all;
  int begin = groups.start(0);
  for (int g = 0; g < groups.groups; ++g) {
    int const end = groups.end(g, begin);
    all.push_back({g, {begin, end - begin}});
    begin = end;
  }
  return all;
}

// The same cut into pieces of kBlockRows.
inline std::vector<Block> row_blocks(Groups const& groups) {
  std::vector<Block> all;
  for (Block const& e : group_rows(groups)) {
    for (Span const& rows : spans(e.rows.count, kBlockRows)) {
      all.push_back({e.expert, {e.rows.first + rows.first, rows.count}});
    }
  }
  return all;
}

// Work, in operations, below which waking other threads costs more than it saves.
inline constexpr double kLeastWork = 32768;

// Calls body(i) for i in [0, count), on OpenMP threads if there is enough work. If calls throw, for
// example std::bad_alloc, rethrows one of the exceptions after all calls have ended.
template <class Body>
void parallel(int64_t count, double work, Body&& body) {
  std::exception_ptr thrown;
#pragma omp parallel for schedule(dynamic) if (count > 1 && work >= kLeastWork)
  for (int64_t i = 0; i < count; ++i) {
    try {
      body(i);
    } catch (...) {
#pragma omp critical
      thrown = std::current_exception();
    }
  }
  if (thrown) std::rethrow_exception(thrown);
}

// Calls body(a, b) for every pair, in parallel.
template <class A, class B, class Body>
void parallel_pairs(std::vector<A> const& first, std::vector<B> const& second, double work,
                    Body&& body) {
  int64_t const across = int64_t(second.size());
  parallel(int64_t(first.size()) * across, work,
           [&](int64_t i) { body(first[i / across], second[i % across]); });
}

// The work of one matrix product over all of a layer's rows.
inline double product_work(Sizes const& s) {
  return double(s.rows()) * double(s.hidden) * double(s.intermediate);
}

}  // namespace guild::cpu
