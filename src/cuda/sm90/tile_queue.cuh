// The tile scheduler: one warp finds the block's tiles and passes them to all other warps through a
// queue in shared memory. A block takes every n-th tile (static) or claims tiles from a counter in
// global memory (dynamic).
#pragma once
#include "cuda/arch/cluster.cuh"
#include "cuda/warp.cuh"
#include "shared/gemm_config.h"
#include "shared/tiles.h"

namespace guild::cuda {

// Maps tile numbers to tiles: every `stride`-th number, or those passed to go_to(). Runs in a whole
// warp; each lane holds the bounds of one of 32 groups, so that the warp waits for memory once per
// 32 groups.
template <class Work>
class TileFinder {
 public:
  Work const work;

  __device__ TileFinder(Work const& work, int next_tile, int stride)
      : work(work), next_tile(next_tile), stride(stride), end(work.groups.start(0)) {}

  // The tile that next() is to return; its number must be greater than any before.
  __device__ void go_to(int tile) { next_tile = tile; }

  // The next tile, the same for all lanes; false when there are no more.
  __device__ bool next(Tile& tile) {
    while (next_tile >= tiles) {
      if (group + 32 >= work.groups.groups) return false;
      next_groups();
    }
    int const owner = 31 - __clz(__ballot_sync(~0u, before <= next_tile));
    int const local = next_tile - __shfl_sync(~0u, before, owner);
    tile = work.at(local, owner_of(owner), __shfl_sync(~0u, begin, owner),
                   __shfl_sync(~0u, end, owner));
    next_tile += stride;
    return true;
  }

  // All tiles, once next() has returned false.
  __device__ int count() const { return tiles; }

 private:
  __device__ int owner_of(int lane) const {
    if constexpr (Work::kHasOrder) {
      if (work.order != nullptr) return __shfl_sync(~0u, ordered, lane);
    }
    return group + lane;
  }

  // Loads the bounds of the lane's group.
  __device__ void place(bool exists) {
    if constexpr (Work::kHasOrder) {
      if (work.order != nullptr) {
        ordered = exists ? work.order[group + threadIdx.x % 32] : 0;
        begin = work.groups.start(ordered);
        end = work.groups.end(ordered, begin);
        return;
      }
    }
    int const last = __shfl_sync(~0u, end, 31);
    int const bound = exists ? work.groups.bound(group + threadIdx.x % 32) : 0;
    end = max(last, warp_scan(bound, [](int x, int y) { return max(x, y); }));
    begin = __shfl_up_sync(~0u, end, 1);
    if (threadIdx.x % 32 == 0) begin = last;
  }

  __device__ void next_groups() {
    group += 32;
    bool const exists = group + int(threadIdx.x % 32) < work.groups.groups;
    place(exists);
    int const count = exists ? work.matrix(begin, end).count() : 0;
    before = tiles + warp_scan(count) - count;
    tiles = __shfl_sync(~0u, before + count, 31);
  }

  int next_tile, stride;
  int group = -32;         // of lane 0
  int tiles = 0;           // number of tiles of all groups up to the last lane's
  int ordered = 0;         // with an order: the lane's group
  int begin, end, before;  // the bounds of the lane's group; the number of tiles before it
};

// One warp's position in the queue: the entry it writes or reads next.
struct QueueEnd {
  static constexpr int kEntries = 4;
  int at = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++at == kEntries) at = 0, phase ^= 1;
  }
};

// A queue of tiles in shared memory with one writer; each of `readers` warps reads every tile.
template <int readers>
struct TileQueue {
  static constexpr int kWords = sizeof(Tile) / 4;
  Tile entry[QueueEnd::kEntries];  // expert -1: there are no more
  Barrier ready[QueueEnd::kEntries], free[QueueEnd::kEntries];
  // Dynamic scheduling in a cluster: the number of the tile that the entry will hold, broadcast by
  // rank 0. Rank 0's `free` barriers also take one arrival from each block, once it has read its
  // number.
  int number[QueueEnd::kEntries];
  Barrier numbered[QueueEnd::kEntries];

  // told: the number of blocks that this one broadcasts numbers to, itself included; 0 if none.
  __device__ void init(int told) {
    for (Barrier& b : ready) b.init(1);
    for (Barrier& b : free) b.init(readers * kWords + told);
    for (Barrier& b : numbered) b.init(1);
  }

  __device__ void wait_for_free(QueueEnd const& end) { free[end.at].wait(end.phase ^ 1); }
  __device__ void put(QueueEnd& end, Tile const& tile) {
    if (threadIdx.x % 32 == 0) {
      entry[end.at] = tile;
      ready[end.at].arrive();
    }
    end.advance();
  }
  // False when there are no more.
  __device__ bool take(QueueEnd& end, Tile& tile) {
    ready[end.at].wait(end.phase);
    int const lane = threadIdx.x % 32;
    int const word = lane < kWords ? reinterpret_cast<int const*>(&entry[end.at])[lane] : 0;
    if (lane < kWords) free[end.at].arrive();
    // Shuffles make the values uniform for the compiler.
    struct {
      int word[kWords];
    } words;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words.word[i] = __shfl_sync(~0u, word, i);
    tile = __builtin_bit_cast(Tile, words);
    end.advance();
    return tile.expert >= 0;
  }
};

// The scheduler, a warp: finds this block's tiles and announces them to all its warps.
template <class Work, GemmConfig C>
class TileScheduler {
 public:
  __device__ explicit TileScheduler(Work const& work)
      : finder(work, blockIdx.x / C.cluster, gridDim.x / C.cluster) {}

  // Queues this block's part, possibly empty, of the cluster's next tile. Returns false if there
  // are no more tiles; the queue then gets expert -1.
  template <class Queue>
  __device__ bool announce(Queue& queue) {
    queue.wait_for_free(end);
    if (finder.work.taken != nullptr) finder.go_to(claim(queue));
    Tile tile;
    bool const more = finder.next(tile);
    if (more) {
      int const rank = C.cluster == 1 ? 0 : cluster_rank(), tile_n = finder.work.tile_n;
      tile = share_of(tile, rank, C.tile_m, tile_n, finder.work.across * tile_n);
    } else {
      tile.expert = -1;
    }
    queue.put(end, tile);
    return more;
  }

 private:
  // Claims the next tile for the whole cluster and returns its number: the block of rank 0
  // increments the counter and broadcasts what it got.
  template <class Queue>
  __device__ int claim(Queue& queue) {
    int number = 0;
    bool const leads = threadIdx.x % 32 == 0;
    if constexpr (C.cluster == 1) {
      if (leads) number = atomicAdd(finder.work.taken, 1);
    } else {
      Barrier& numbered = queue.numbered[end.at];
      int& told = queue.number[end.at];
      if (leads) {
        numbered.arrive_expect(sizeof(int));
        if (cluster_rank() == 0) {
          number = atomicAdd(finder.work.taken, 1);
          for (int rank = 0; rank < C.cluster; ++rank) {
            store_to_block(&told, number, numbered, rank);
          }
        }
      }
      numbered.wait(end.phase);
      number = told;
      if (leads) queue.free[end.at].arrive_at(0);
    }
    return __shfl_sync(~0u, number, 0);
  }

  TileFinder<Work> finder;
  QueueEnd end;
};

}  // namespace guild::cuda
