// Maps tile numbers to the tiles of a plan's groups.
#pragma once
#include <type_traits>

#include "cuda/sm90/decode/plan.cuh"
#include "cuda/sm90/decode/results.cuh"
#include "cuda/sm90/tile_queue.cuh"

namespace guild::cuda::sm90 {

// Tiles of shared experts come first, then those of the groups. Used by a whole warp.
template <DecodeShape S, PlanFrom from>
class PlannedTiles {
  // For few groups, a linear search takes less code than a TileFinder.
  static constexpr bool kFewGroups = from >= PlanFrom::few_slots;

 public:
  // work: the tiles of the groups. shared_rows, shared_across: rows of X of shared experts, 0 if
  // there are none; their tiles side by side.
  __device__ PlannedTiles(RowTiles const& work, Plan const& plan, int shared_rows,
                          int shared_across)
      : work(work),
        plan(plan),
        finder(work, 0, 0),
        shared_rows(shared_rows),
        shared_high((shared_rows + S.tokens - 1) / S.tokens),
        shared(shared_high * shared_across) {}

  // Returns false if there are fewer. `number` must be greater than any before.
  __device__ bool find(int number, Tile& tile) {
    if (number < shared) {
      int const high = unsigned(number) / unsigned(shared_high);
      int const row = (number - high * shared_high) * S.tokens;
      tile = {.expert = kSharedExpert,
              .row = row,
              .col = high * work.tile_n,
              .rows = min(shared_rows - row, S.tokens)};
      return true;
    }
    if (in_row()) return find_in_row(number - shared, tile);
    if constexpr (kFewGroups) {
      return search(number - shared, tile);
    } else {
      finder.go_to(number - shared);
      bool const found = finder.next(tile);
      if (found) tile.expert = plan.expert[tile.expert];
      return found;
    }
  }
  // All tiles, once find() has returned false.
  __device__ int count() const {
    if (in_row()) return shared + plan.count * work.across;
    if constexpr (kFewGroups) {
      int all = shared;
#pragma unroll 1
      for (int group = 0; group < plan.count; ++group) all += tiles_of(group);
      return all;
    } else {
      return shared + finder.count();
    }
  }

 private:
  // Whether every group has a single row of tiles, so that no search is needed. A token's chosen
  // experts are distinct, so each has one row.
  __device__ bool in_row() const { return chooses(from) || (S.tokens == 8 && plan.flat); }
  __device__ bool find_in_row(int number, Tile& tile) const {
    int const group = unsigned(number) / unsigned(work.across);
    if (group >= plan.count) return false;
    int const begin = plan.end[group];
    tile = {.expert = plan.expert[group],
            .row = begin,
            .col = (number - group * work.across) * work.tile_n,
            .rows = plan.end[group + 1] - begin};
    return true;
  }
  __device__ bool search(int number, Tile& tile) const {
#pragma unroll 1
    for (int group = 0; group < plan.count; ++group) {
      int const tiles = tiles_of(group);
      if (number < tiles) {
        int const high = tiles / work.across, row = plan.end[group] + number % high * S.tokens;
        tile = {.expert = plan.expert[group],
                .row = row,
                .col = number / high * work.tile_n,
                .rows = min(plan.end[group + 1] - row, S.tokens)};
        return true;
      }
      number -= tiles;
    }
    return false;
  }
  __device__ int tiles_of(int group) const {
    int const rows = plan.end[group + 1] - plan.end[group];
    return (rows + S.tokens - 1) / S.tokens * work.across;
  }

  struct NoFinder {
    __device__ NoFinder(RowTiles const&, int, int) {}
  };
  RowTiles const work;
  Plan const& plan;
  std::conditional_t<kFewGroups, NoFinder, TileFinder<RowTiles>> finder;
  int const shared_rows, shared_high, shared;  // rows; tiles upon each other; tiles
};

}  // namespace guild::cuda::sm90
