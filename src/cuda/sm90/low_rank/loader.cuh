// A loader with a low-rank term: the sum over K continues over a second pair of operands.
//
//   [A, T] [W, B]^T = A W^T + T B^T
//
// The underlying loader handles the steps of A and W. Those of T (rows, rank) and B (E, n, rank)
// follow: TMA loads rows of T, which are never gathered, and B like a weight, and fills both with
// zeros past the end of the last step.
#pragma once
#include "cuda/sm90/loaders.cuh"

namespace guild::cuda {

template <OperandLoader Base, GemmConfig C>
struct WithLowRank : Base {
  struct Params : Base::Params {
    int steps;      // of the sum over A and W
    CUtensorMap t;  // (rank, 1, rows), boxes of 64 x 1 x 64
    WeightLoader<C, Base::kMajorB> low_rank;
  };
  // Rows of T past the tile's own are those of the next group.
  static constexpr bool kClearsRest = false;
  static constexpr int kRegisters = Base::kThreads == 128 ? 56 : Base::kRegisters;
  Params const& p;

  __device__ WithLowRank(Params const& p, typename Base::Storage& storage, int thread)
      : Base(p, storage, thread), p(p) {}

  __device__ void load(Tile const& tile, int step, char* a, char* b, Barrier& full) {
    int const beyond = step - p.steps;
    if (beyond < 0) {
      Base::load(tile, step, a, b, full);
      return;
    }
    if (this->thread == 0) {
      full.arrive_expect(stage_bytes<C>(tile));
      load_rows<C>(p.t, beyond * C.tile_k, 0, tile, a, full);
      if (tile.rows > 0) p.low_rank.load(tile, beyond, b, full);
    }
    if constexpr (Base::kArrivals > 1) full.arrive_when_copied();
  }
};

}  // namespace guild::cuda
