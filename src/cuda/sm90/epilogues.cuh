// Epilogues: what a consumer warpgroup does with a tile's sums, one struct per fused output.
//
// kernel.cuh has a consumer loop for each of two kinds:
//
//   StoringEpilogue   results depend on the sums alone; some stores are deferred and overlap with
//                     the next tile's products (this file, activate.cuh)
//   ReadingEpilogue   also reads a matrix of the tile's size, which the producer loads through the
//                     ring of stages (down_gradient.cuh)
//
// Unless noted, all threads of the consumer warpgroup call each function together. thread: 0 .. 127
// within it. rows: the warpgroup's own 64 rows of the tile, see row_block(); it has none if
// rows.rows <= 0.
#pragma once
#include <concepts>

#include "cuda/sm90/outputs.cuh"
#include "shared/tiles.h"

namespace guild::cuda {

// Common to both kinds: Storage, the shared memory of one consumer warpgroup (an empty struct if
// none), and either start() or load_bias().
//
//   start<n>(sums, tile, thread)
//                    before the tile's first product: may initialise the accumulators. If it
//                    returns false, it has not, and the first product overwrites them. tile: with
//                    all its rows
template <class E, int n>
concept StartsSums = requires(E const& e, float (&sums)[n / 2], Tile const& tile, int thread) {
  { e.template start<n>(sums, tile, thread) } -> std::same_as<bool>;
};
//   has_bias()       whether sums start with a bias, which arrives with the tile's first stage
//   load_bias<n>(tile, to, full)
//                    if has_bias(), called by one producer thread: announces and issues the loads
//                    of the bias of the tile's n columns
template <class E, int n>
concept LoadsBias = requires(E const& e, Tile const& tile, char* to, Barrier& full) {
  { e.has_bias() } -> std::same_as<bool>;
  e.template load_bias<n>(tile, to, full);
};
template <class E, int n>
concept TileEpilogue = (StartsSums<E, n> || LoadsBias<E, n>) && requires { typename E::Storage; };

// Per-thread state of the tile being stored:
//
//   kMostSteps       at most this many calls of step() per tile; 0: begin() stores everything
//   begin(epilogue, sums, storage, rows, thread)
//                    after the tile's last product, once the previous tile is fully stored: stores
//                    a part of the sums and copies the rest to registers of its own, since the next
//                    tile's products overwrite `sums`
//   left()           whether anything remains to be stored
//   step(epilogue, storage, thread)
//                    stores the next piece. Called once per whole step of the next tile's sum while
//                    products are in flight, then until nothing is left. A piece should take less
//                    time than a step of the sum, some 1,000 cycles
template <class P, class E, int n>
concept DeferredStores = requires(P parcel, E const& e, float const (&sums)[n / 2],
                                  typename E::Storage& storage, Tile const& rows, int thread) {
  { P::kMostSteps } -> std::convertible_to<int>;
  parcel.begin(e, sums, storage, rows, thread);
  { parcel.left() } -> std::same_as<bool>;
  parcel.step(e, storage, thread);
};

template <class E, int n>
concept StoringEpilogue = TileEpilogue<E, n> && requires {
  typename E::template Parcel<n>;
  requires DeferredStores<typename E::template Parcel<n>, E, n>;
};

template <class E, int n>
constexpr bool stores_at_once() {
  if constexpr (StoringEpilogue<E, n>) return E::template Parcel<n>::kMostSteps == 0;
  return false;
}

// A unit is the part of the matrix read that belongs to 64 columns of the tile. Called per tile, in
// this order:
//
//   units(tile)      how many units follow the tile's products through the ring. Producer and
//                    consumers both call it and must get the same answer
//   load(tile, unit, to, full)
//                    by one producer thread: announces and issues the loads of a unit to `to`, a
//                    stage's B operand
//   begin(state, rows, thread)
//                    before the first product. State: a thread's values for one tile, in registers
//   wants_side_sums(rows), side_sums(storage, rows, rest, thread)
//                    whether to sum A's columns beside the products, and the object that does so
//                    (ScoreSums, column_sums.cuh). rest: the first row of A that may hold anything
//                    because it is not the tile's; 64 if there is none
//   store_unit(sums, a, b, state, rows, unit, thread, storer, storage)
//                    when the unit has landed in b, if rows.rows > 0: computes results from it and
//                    the unit's 32 sums. a, b: the consumer's 64 rows of the stage's operands, both
//                    free for results. Thread `storer` issues all TMA stores as one group
//   finish(state, rows, thread)
//                    after the last unit, if rows.rows > 0
//
// prepare(storage, thread) is called once, before the first tile. kCopies: the unroll factor of the
// loop over units, that is, the number of copies of store_unit()'s code.
template <class E>
concept LoadsUnits = requires(E const& e, char* stage, Barrier& full, Tile const& tile, int i) {
  { e.units(tile) } -> std::same_as<int>;
  e.load(tile, i, stage, full);
};

template <class E, int n>
concept ReadingEpilogue =
    TileEpilogue<E, n> && LoadsUnits<E> &&
    requires(E const& e, typename E::State& state, typename E::Storage& storage,
             float (&sums)[n / 2], char* stage, Barrier& full, Tile const& tile, int i) {
      { E::kCopies } -> std::convertible_to<int>;
      e.prepare(storage, i);
      e.begin(state, tile, i);
      { e.wants_side_sums(tile) } -> std::same_as<bool>;
      e.side_sums(storage, tile, i, i);
      e.store_unit(sums, stage, stage, state, tile, i, i, i, storage);
      e.finish(state, tile, i);
    };

// Stores a tile of n columns in two halves: the first at once; the second is packed to T and stored
// during the next tile's products. E::put(word, half, ...) writes a half to its boxes and stores
// it.
template <class T, int n, class E>
class TwoHalves {
 public:
  static constexpr int kMostSteps = 1;

  __device__ bool left() const { return waiting; }

  __device__ void begin(E const& epilogue, float const (&acc)[n / 2], StoreBoxes& boxes,
                        Tile const& rows, int thread) {
    tile = rows;
    if (tile.rows <= 0) return;
    HalfWords first;
    pack_half(first, acc, 0);
    epilogue.template put<n>(first, 0, boxes, tile, thread);
    pack_half(word, acc, 1);
    waiting = n > 128 && tile.col + 128 < epilogue.width();
  }

  __device__ void step(E const& epilogue, StoreBoxes& boxes, int thread) {
    epilogue.template put<n>(word, 1, boxes, tile, thread);
    waiting = false;
  }

 private:
  static __device__ void pack_half(HalfWords& word, float const (&acc)[n / 2], int half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (64 * half + 32 * i < n / 2) pack_box<T>(word[i], acc + 64 * half + 32 * i);
    }
  }

  HalfWords word;
  Tile tile;
  bool waiting = false;
};

// Stores all of a tile at once, element by element.
template <int n, class E>
struct AllAtOnce {
  static constexpr int kMostSteps = 0;

  __device__ bool left() const { return false; }
  __device__ void begin(E const& epilogue, float const (&acc)[n / 2], typename E::Storage&,
                        Tile const& rows, int thread) {
    if (rows.rows > 0) epilogue.template store<n>(acc, rows, thread);
  }
  __device__ void step(E const&, typename E::Storage&, int) {}
};

// D = A B^T + bias, by row.
template <class T>
struct StoreRows {
  RowOutput<T> d;
  Bias<T> bias;  // (E, columns), rows on 16-byte boundaries

  using Storage = StoreBoxes;
  template <int n>
  using Parcel = TwoHalves<T, n, StoreRows>;

  __device__ bool has_bias() const { return bias.data != nullptr; }
  template <int n>
  __device__ void load_bias(Tile const& tile, char* to, Barrier& full) const {
    bias.load(to, tile.expert, 0, tile.col, min(n, d.columns - tile.col), full);
  }
  __device__ int width() const { return d.columns; }
  template <int n>
  __device__ void put(HalfWords const& word, int half, StoreBoxes const& boxes, Tile const& tile,
                      int thread) const {
    int const col = tile.col + 128 * half;
    boxes.wait(thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (128 * half + 64 * i < n) words_to_box(boxes.address(i), word[i], thread);
    }
    boxes.send(thread, [&] {
      d.store(boxes.box[0], tile, col, 0);
      if (128 * half + 64 < n && col + 64 < d.columns) d.store(boxes.box[1], tile, col + 64, 0);
    });
  }
};

// The same, or one matrix per expert, for results that TMA cannot store: float32, strides that are
// not multiples of 16 bytes, or accumulation into D.
template <class T>
struct StoreDirect {
  DirectOutput d;
  Bias<T> bias;

  struct Storage {};
  template <int n>
  using Parcel = AllAtOnce<n, StoreDirect>;

  template <int n>
  __device__ bool start(float (&acc)[n / 2], Tile const& tile, int thread) const {
    return bias.template start<n>(acc, tile, d.columns, thread);
  }
  template <int n>
  __device__ void store(float const (&acc)[n / 2], Tile const& tile, int thread) const {
    store_direct<T, n>(d, acc, tile.expert, tile.row, tile.col, tile.rows, thread);
  }
};

// D[e] = A^T B, one matrix per expert, rows or columns contiguous.
template <class T>
struct StoreExpert {
  CUtensorMap map;  // (columns, rows, E), or (rows, columns, E) where transposed
  bool transposed;  // rows of D are contiguous in memory, not columns
  int columns;
  int32_t const* expert_at;  // the map's third coordinate; null: the expert itself

  using Storage = StoreBoxes;
  template <int n>
  using Parcel = TwoHalves<T, n, StoreExpert>;

  template <int n>
  __device__ bool start(float (&)[n / 2], Tile const&, int) const {
    return false;
  }
  __device__ int width() const { return columns; }
  template <int n>
  __device__ void put(HalfWords const& word, int half, StoreBoxes const& boxes, Tile const& tile,
                      int thread) const {
    boxes.wait(thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (transposed) {
        words_to_box_transposed(boxes.address(i), word[i], thread);
      } else {
        words_to_box(boxes.address(i), word[i], thread);
      }
    }
    boxes.send(thread, [&] {
      int const e = placed(expert_at, tile.expert);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const col = tile.col + 128 * half + 64 * i;
        int const x = transposed ? tile.row : col, y = transposed ? col : tile.row;
        if (col < columns) tma_store(map, boxes.box[i], Coordinate{x, y, e});
      }
    });
  }
};

}  // namespace guild::cuda
