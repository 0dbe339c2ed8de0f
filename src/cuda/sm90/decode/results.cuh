// The epilogue where weights are wgmma's M: a thread holds weight rows, that is, columns of the
// results, for two of every eight tokens. Results are transposed through shared memory and stored
// by row.
#pragma once
#include "cuda/sm90/decode/ring.cuh"
#include "cuda/sm90/outputs.cuh"

namespace guild::cuda::sm90 {

// A tile's expert where the tile is the shared experts'.
inline constexpr int kSharedExpert = 1 << 20;

// H = X W^T + bias and A = activation(H); or, without `activates`, A = H only. A tile's rows of the
// weight follow each other or, for Pairing::halves, are gate and up of the same columns in its
// first and second half. known: any; or one for calls that do not want H and, for swiglu, have no
// biases.
template <class T, DecodeShape S, bool activates, StaticActivation known>
struct DecodeResults {
  static constexpr int parts = S.parts(), kHalf = S.rows / 2;
  // Whether a warp's 16 rows are all of gate or all of up; otherwise each eight of them is.
  static constexpr bool kByWarps = kHalf % 16 == 0;
  static constexpr int kUpPlaces = (kByWarps ? 2 : 4) * kHalf;
  struct Matrix {
    T* data;  // null: not wanted
    int64_t stride;
  };
  struct Target {
    Matrix h, a;   // h: of `columns` columns, or twice as many for Pairing::halves
    Bias<T> bias;  // ordered as h
    int columns;   // weight rows, of one half where there are two
  };
  Target target[2];  // of the experts, of the shared ones
  StaticPairing<known> pairing;
  ActivationOf<float> activation;

  // 64 columns of results by token; rows are padded so that a warp's stores have no bank conflicts.
  template <int tokens>
  struct Storage {
    union {
      alignas(16) T value[tokens][64 + 8];
      // Before that, sums of up, where other threads have those of gate.
      float up[parts == 1 && activates ? tokens / 2 : 1][parts == 1 ? kUpPlaces : 1];
    };
  };

  // Fills the accumulators with the bias; false if there is none.
  template <int count>
  __device__ bool start(float (&acc)[parts][count], Tile const& tile) const {
    Target const& to = of(tile);
    if (to.bias.data == nullptr) return false;
    T const* const row = to.bias.data + tile.expert * to.bias.stride;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        int const within = fragment_row(threadIdx.x) + 8 * below;
        Place const at = place_of(part, within, tile);
        bool const there = within < S.rows && at.col < to.columns;
        float const value = there ? float(row[at.first + at.col]) : 0.f;
#pragma unroll
        for (int i = 0; i < count; ++i) {
          if (i % 4 / 2 == below) acc[part][i] = value;
        }
      }
    }
    return true;
  }

  template <int count, class Storage>
  __device__ void store(float (&acc)[parts][count], Tile const& tile, Storage& storage) const {
    if constexpr (!activates) {
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        put(of(tile).a, acc[part], part, tile, storage);
      }
    } else {
      Matrix const& h = of(tile).h;
      if (known == StaticActivation::any && h.data != nullptr) {
#pragma unroll
        for (int part = 0; part < parts; ++part) put(h, acc[part], part, tile, storage);
      }
      store_activated(acc, tile, storage);
    }
  }

 private:
  __device__ Target const& of(Tile const& tile) const {
    return target[tile.expert == kSharedExpert];
  }

  // Where a row of a block belongs: column `col` of H, from `first` on.
  struct Place {
    int first, col;
  };
  __device__ Place place_of(int part, int row, Tile const& tile) const {
    if (pairing != Pairing::halves) return {0, tile.col + 64 * part + row};
    if constexpr (parts == 2) return {part * of(tile).columns, tile.col + row};
    return {row / kHalf * of(tile).columns, tile.col + row % kHalf};
  }

  template <int count, class Storage>
  __device__ void store_activated(float (&acc)[parts][count], Tile const& tile,
                                  Storage& storage) const {
    if (parts == 1 && pairing == Pairing::halves) take_up(acc[0], storage);
    with_static_family<known>(activation, [&](auto family) {
      if (pairing == Pairing::alternate) return activate_neighbours<family.value>(acc, tile.rows);
      auto const act = with_gate(with_constants<known>(activation), pairing == Pairing::halves);
      bool const halves = pairing == Pairing::halves;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        if (halves && part == 1) break;
#pragma unroll
        for (int i = 0; i < count; ++i) {
          if (i % 4 == 0 && 2 * i >= tile.rows) break;
          float const up = !halves      ? 0.f
                           : parts == 2 ? acc[parts - 1][i]
                                        : storage.up[up_row(i)][up_place(i)];
          acc[part][i] = activate<family.value>(act, acc[part][i], up);
        }
      }
    });
    if (pairing == Pairing::alternate) return put_pairs(acc, tile, storage);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      if (pairing == Pairing::halves) {
        if (part == 0) put_columns(of(tile).a, acc[0], tile.col, kHalf, tile, storage);
      } else {
        put(of(tile).a, acc[part], part, tile, storage);
      }
    }
  }

  // Where to find the sum of up that belongs to a thread's i-th sum, which may itself be gate or
  // up.
  static __device__ int up_row(int i) { return kByWarps ? i : i / 4 * 2 + i % 2; }
  static __device__ int up_place(int i) {
    if constexpr (kByWarps) return threadIdx.x % (2 * kHalf);
    return eight_of(i) % (kHalf / 8) * 32 + threadIdx.x % 32;
  }
  // Which eight rows of the tile the sum is of.
  static __device__ int eight_of(int i) { return 2 * warp_index() + i % 4 / 2; }

  // Passes the sums of up to the threads that have those of gate.
  template <int count, class Storage>
  __device__ void take_up(float (&acc)[count], Storage& storage) const {
    consumers_barrier();
    if constexpr (kByWarps) {
      if (warp_index() / (kHalf / 16) == 1) {
#pragma unroll
        for (int i = 0; i < count; ++i) storage.up[up_row(i)][up_place(i)] = acc[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (eight_of(i) / (kHalf / 8) == 1) storage.up[up_row(i)][up_place(i)] = acc[i];
      }
    }
    consumers_barrier();
  }

  // Even weight rows are gate, each followed by its row of up. A lane has the sums of rows q and q
  // + 8, q = lane / 4. For even q both are gate, and the lane four above has the matching up rows.
  // The two lanes exchange one sum each, and each then holds a pair: the lane of even q gives away
  // row q + 8 and gets rows q and q + 1; the lane of odd q gives away row q and gets rows q + 7 and
  // q + 8. The result goes where the sum of row q was.
  template <Family family, int count>
  __device__ void activate_neighbours(float (&acc)[parts][count], int rows) const {
    auto const act = with_gate(with_constants<known>(activation), true);
    bool const odd = threadIdx.x / 4 % 2 != 0;
#pragma unroll
    for (auto& part : acc) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (i % 4 == 0 && 2 * i >= rows) break;
        if (i % 4 >= 2) continue;
        float const kept = odd ? part[i + 2] : part[i];
        float const got = __shfl_xor_sync(~0u, odd ? part[i] : part[i + 2], 4);
        part[i] = activate<family>(act, odd ? got : kept, odd ? kept : got);
      }
    }
  }

  // Stores the columns of A that activate_neighbours() made.
  template <int count, class Storage>
  __device__ void put_pairs(float const (&acc)[parts][count], Tile const& tile,
                            Storage& storage) const {
    int const q = threadIdx.x % 32 / 4, place = threadIdx.x / 32 * 8 + q / 2 + q % 2 * 4;
    consumers_barrier();
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (i % 4 == 0 && 2 * i >= tile.rows) break;
        if (i % 4 < 2) storage.value[token_of(i)][32 * part + place] = T(acc[part][i]);
      }
    }
    consumers_barrier();
    int const chunk = threadIdx.x % 8 * kElementsPer16Bytes, col = tile.col / 2 + chunk;
    if (chunk < kHalf && col < of(tile).columns / 2) copy(of(tile).a, col, chunk, tile, storage);
  }

  // Stores a block's rows as columns of H, or of A where that is H.
  template <int count, class Storage>
  __device__ void put(Matrix const& to, float const (&acc)[count], int part, Tile const& tile,
                      Storage& storage) const {
    stage(acc, tile, storage);
    int const chunk = threadIdx.x % 8 * kElementsPer16Bytes;
    Place const at = place_of(part, chunk, tile);
    if (chunk < S.rows && at.col < of(tile).columns)
      copy(to, at.first + at.col, chunk, tile, storage);
  }
  // Stores a block's first rows as columns from `col` on.
  template <int count, class Storage>
  __device__ void put_columns(Matrix const& to, float const (&acc)[count], int col, int width,
                              Tile const& tile, Storage& storage) const {
    stage(acc, tile, storage);
    int const chunk = threadIdx.x % 8 * kElementsPer16Bytes;
    if (chunk < width && col + chunk < of(tile).columns)
      copy(to, col + chunk, chunk, tile, storage);
  }

  template <int count, class Storage>
  __device__ void stage(float const (&acc)[count], Tile const& tile, Storage& storage) const {
    consumers_barrier();
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i % 4 == 0 && 2 * i >= tile.rows) break;
      int const row = fragment_row(threadIdx.x) + i % 4 / 2 * 8;
      storage.value[token_of(i)][row] = T(acc[i]);
    }
    consumers_barrier();
  }

  // Copies eight columns of each of the tile's rows, from `from` on, to column `to_col`.
  template <class Storage>
  __device__ void copy(Matrix const& to, int to_col, int from, Tile const& tile,
                       Storage const& storage) const {
    for (int r = threadIdx.x / 8; r < tile.rows; r += 16) {
      *reinterpret_cast<uint4*>(to.data + (tile.row + r) * to.stride + to_col) =
          *reinterpret_cast<uint4 const*>(&storage.value[r][from]);
    }
  }

  // The token of a thread's i-th sum.
  static __device__ int token_of(int i) { return i / 4 * 8 + fragment_column(threadIdx.x) + i % 2; }
  static __device__ void consumers_barrier() { named_barrier(1, 128); }
};

}  // namespace guild::cuda::sm90
