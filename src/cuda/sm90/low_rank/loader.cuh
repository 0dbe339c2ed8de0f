// A loader with a low-rank term: the sum over K goes on with steps of a second pair of operands.
//
//   [A, T] [W, B]^T = A W^T + T B^T
//
// The steps of A and W are those of the underlying loader. Then come those of T (rows, rank), whose
// rows TMA loads and which are never gathered, and of B (E, n, rank), another weight. TMA fills
// what the last step lacks with zeros in both.
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
