// O[t] = residual_scale[t] * residual[t] + sum over k of slot_score[t, k] * Y[slot_row[t, k]], and
// the router's part.
//
// Without the router's part: one block per token (several where tokens are few), eight columns per
// thread, in fp32 with k ascending. With it: a block keeps a slice of the router's weights in
// shared memory, if it fits: all experts and up to 256 columns. Each warp computes these columns
// for one token after another. A separate GEMM for the router's part would read and write dX again,
// and multiply by E - K zeros.
#include <algorithm>

#include "checks/check.h"
#include "cuda/alignment.h"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/arch/l2.cuh"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/rows/combine.h"
#include "cuda/shared_memory.h"
#include "cuda/warp.cuh"
#include "shared/gpu.h"
#include "shared/routing.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

template <class T>
struct Matrix {
  T* data;
  int64_t stride;
  __device__ T* at(int64_t row, int col) const { return data + row * stride + col; }
};

template <class T>
struct Args {
  Matrix<T const> y, residual;
  Matrix<T> o;
  int32_t const* slot_row;
  float const* slot_score;
  int32_t const* token_offsets;
  float const* residual_scale;  // of a token; null: 1
  int rows, slots, top_k, tokens, hidden;
  bool early;  // rows and scores of the slots may be read before wait_for_previous()
  bool late;   // the residual may not be read before it
  T const* a;  // discarded with y: a row has a_lines lines of L2
  int a_lines;

  // The initial value of a token's sum of eight columns.
  __device__ Eight start(int64_t token, int col) const {
    if (residual.data == nullptr) return Eight{};
    Eight first = load_eight(residual.at(token, col));
    if (residual_scale == nullptr) return first;
    float const factor = residual_scale[token];
#pragma unroll
    for (float& value : first.value) value = float(T(factor * value));
    return first;
  }
};

__device__ void add(Eight& sum, float factor, Eight const& x) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum.value[i] += factor * x.value[i];
}

constexpr int kThreads = 256;
constexpr int64_t kFewTokens = 64;
constexpr int kAtOnce = 8;  // rows that a thread loads before it adds them

constexpr int kLineElements = kLineBytes / kElementBytes;
static_assert(kLineElements == 8 * 8);  // eight lanes of eight columns

// Discards the line of Y that eight lanes have read, and a part of the row of A.
template <class T>
__device__ void discard(Args<T> const& p, int row, int col, bool first_of_block) {
  if (col % kLineElements == 0) discard_line(const_cast<T*>(p.y.at(row, col)));
  if (!first_of_block) return;
  T const* const a = p.a + int64_t(row) * p.a_lines * kLineElements;
  int const lanes = min(int(blockDim.x), p.hidden / 8);  // that have columns
  for (int line = threadIdx.x; line < p.a_lines; line += lanes) {
    discard_line(const_cast<T*>(a) + line * kLineElements);
  }
}

template <class T, bool discards>
__global__ void __launch_bounds__(kThreads) combine_kernel(Args<T> p) {
  bool waits = p.early;
  if (!waits) wait_for_previous();
  let_next_start();
  int64_t const token = blockIdx.x;
  auto const [begin, end] = slots_of(p.token_offsets, p.slots, p.top_k, token);
  int32_t const* const row_of = p.slot_row + begin;
  int const count = int(end - begin);
  int const threads = int(blockDim.x);
  for (int col = (int(blockIdx.y) * threads + int(threadIdx.x)) * 8; col < p.hidden;
       col += int(gridDim.y) * threads * 8) {
    bool const starts = !(waits && p.late);
    Eight sum = starts ? p.start(token, col) : Eight{};
#pragma unroll 1
    for (int k = 0; k < count; k += kAtOnce) {
      int row[kAtOnce];
      float score[kAtOnce];
      uint4 words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        row[i] = k + i < count ? row_of[k + i] : -1;
        score[i] = k + i < count && p.slot_score != nullptr ? p.slot_score[begin + k + i] : 1.f;
      }
      if (waits) wait_for_previous();
      waits = false;
      if (k == 0 && !starts) sum = p.start(token, col);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (unsigned(row[i]) < unsigned(p.rows)) words[i] = load_words(p.y.at(row[i], col));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (unsigned(row[i]) < unsigned(p.rows)) add(sum, score[i], unpack_eight<T>(words[i]));
      }
      if constexpr (discards) {
        unsigned const lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);
        __syncwarp(lanes);  // all lanes of a line have read it
        bool const first = blockIdx.y == 0 && col == int(threadIdx.x) * 8;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (unsigned(row[i]) < unsigned(p.rows)) discard(p, row[i], col, first);
        }
      }
    }
    store_eight(p.o.at(token, col), sum);
  }
}

template <class T>
struct RouterArgs {
  Matrix<T const> dlogits, weight;
  int32_t const* ids;
  int experts;
  int slices, width;  // slices of the columns, each `width` wide except the last
};

constexpr int kSliceColumns = 256;  // at most: eight per lane
constexpr int kWarps = 24;          // of a block, the only one of its multiprocessor
constexpr int kMostSharedBytes = 227 * 1024;

// A lane's slot of a token, prefetched in two stages. load() issues the loads of its row and id two
// tokens ahead; follow(), one token later, turns them into the row's address and loads dlogit.
// Neither waits for what it loads.
struct PrefetchedSlot {
  uint32_t row;  // where it begins, in units of 16 bytes; kNone: no row
  int id;        // the number of experts: no expert
  float dlogit;

  template <class T>
  __device__ void load(Args<T> const& p, RouterArgs<T> const& r, int64_t slot, int64_t end) {
    row = slot < end ? p.slot_row[slot] : -1;
    id = slot < end ? r.ids[slot] : r.experts;
  }
  template <class T>
  __device__ void follow(Args<T> const& p, RouterArgs<T> const& r, int64_t token) {
    row = row < unsigned(p.rows) ? row * uint32_t(p.y.stride / kElementsPer16Bytes) : kNone;
    if (unsigned(id) >= unsigned(r.experts)) id = r.experts;
    dlogit = id == r.experts ? 0.f : float(*r.dlogits.at(token, id));
  }
};

// Loads the block's slice of the router's weights to shared memory: (experts + 1, width), the last
// row zeros.
template <class T>
__device__ void load_slice(Args<T> const& p, RouterArgs<T> const& r, int first, uint4* slice) {
  int const eights = r.width / 8;
  for (int i = threadIdx.x; i < (r.experts + 1) * eights; i += 32 * kWarps) {
    int const expert = i / eights, col = first + i % eights * 8;
    bool const there = expert < r.experts && col < p.hidden;
    slice[i] = there ? load_words(r.weight.at(expert, col)) : uint4{};
  }
  __syncthreads();
}

// A lane's eight columns of the slice. slots: how many rows a warp loads at a time.
template <class T, bool in_shared, int slots>
struct Columns {
  Args<T> const& p;
  RouterArgs<T> const& r;
  int col;
  bool mine;  // whether the lane has columns; if not, it reads those of another lane
  T const* y;
  uint4 const* weight;  // in shared memory

  __device__ Columns(Args<T> const& p, RouterArgs<T> const& r, int first, uint4 const* slice)
      : p(p), r(r) {
    int const lane = threadIdx.x % 32;
    col = first + 8 * lane;
    mine = lane < r.width / 8 && col < p.hidden;
    y = p.y.data + min(col, p.hidden - 8);
    weight = slice + min(lane, r.width / 8 - 1);
  }

  // Issues the loads of the rows of slots k, k + 1, ...; some: rows may be missing.
  template <class Some>
  __device__ void load(uint4 (&words)[slots], uint32_t row_of_lane, int k, Some some) const {
#pragma unroll
    for (int i = 0; i < slots; ++i) {
      uint32_t const row = __shfl_sync(~0u, row_of_lane, k + i);
      if (some() && row == kNone) continue;
      void const* const from = units_after(y, row);
      __builtin_assume(__isGlobal(from));
      words[i] = load_words(from);
    }
  }

  // Adds `count` slots, 32 at most, one in each lane.
  __device__ void add_slots(Eight& sum, PrefetchedSlot const& own, int count) const {
    unsigned const there = __ballot_sync(~0u, own.row != kNone);
#pragma unroll 1
    for (int k = 0; k < count; k += slots) {
      constexpr unsigned all = (1u << slots) - 1;
      uint4 words[slots] = {};
      if ((there >> k & all) == all) {
        load(words, own.row, k, std::false_type());
      } else {
        load(words, own.row, k, std::true_type());
      }
      asm volatile("" ::: "memory");  // all loads before the arithmetic, to hide their latency
#pragma unroll 4
      for (int i = 0; i < slots; ++i) {
        int const id = __shfl_sync(~0u, own.id, k + i);
        float const factor = __shfl_sync(~0u, own.dlogit, k + i);
        if constexpr (in_shared) {
          add(sum, factor, unpack_eight<T>(weight[id * (r.width / 8)]));
        } else {
          if (mine && id < r.experts) add(sum, factor, load_eight(r.weight.at(id, col)));
        }
      }
#pragma unroll
      for (int i = 0; i < slots; ++i) add(sum, 1.f, unpack_eight<T>(words[i]));
    }
  }
};

template <class T, bool in_shared, int slots>
__global__ void __launch_bounds__(32 * kWarps) combine_router_kernel(Args<T> p, RouterArgs<T> r) {
  extern __shared__ uint4 slice[];
  int const first = int(blockIdx.x) % r.slices * r.width, lane = threadIdx.x % 32;
  if constexpr (in_shared) load_slice(p, r, first, slice);
  Columns<T, in_shared, slots> const columns(p, r, first, slice);
  int const stride = int(gridDim.x / r.slices) * kWarps;
  int64_t token = int64_t(blockIdx.x / r.slices) * kWarps + warp_index();
  auto const load = [&](PrefetchedSlot& slot, int64_t token) {
    SlotSpan span{0, 0};
    if (token < p.tokens) span = slots_of(p.token_offsets, p.slots, p.top_k, token);
    slot.load(p, r, span.begin + lane, span.end);
  };
  PrefetchedSlot now, next, after;
  load(now, token);
  now.follow(p, r, token);
  load(next, token + stride);
  for (; token < p.tokens; token += stride) {
    load(after, token + 2 * stride);
    next.follow(p, r, token + stride);
    auto const [begin, end] = slots_of(p.token_offsets, p.slots, p.top_k, token);
    Eight sum = columns.mine ? p.start(token, columns.col) : Eight{};
    int const count = int(end - begin);
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
      if (base > 0) {
        now.load(p, r, begin + base + lane, end);
        now.follow(p, r, token);
      }
      columns.add_slots(sum, now, min(count - base, 32));
    }
    if (columns.mine) store_eight(p.o.at(token, columns.col), sum);
    now = next;
    next = after;
  }
}

template <class T, bool in_shared, int slots>
void launch_with_router(Args<T> const& args, RouterArgs<T> const& router, Queue queue) {
  auto const kernel = combine_router_kernel<T, in_shared, slots>;
  int const bytes = in_shared ? (router.experts + 1) * router.width * int(sizeof(T)) : 0;
  static AllowedOn allowed;
  allow_shared_memory(kernel, kMostSharedBytes, allowed, "shared memory of combine");
  int const most = int(ceil_div(args.tokens, kWarps));
  int const groups = std::clamp(multiprocessors(queue) / router.slices, 1, most);
  kernel<<<groups * router.slices, 32 * kWarps, bytes, queue.stream>>>(args, router);
}

// The fewest whole warps that cover these columns in `passes` passes; more would only cost
// occupancy.
int threads_of(int64_t columns, int64_t passes) {
  return int(ceil_div(ceil_div(columns, 8 * passes), 32)) * 32;
}

template <class T>
void combine_as(Combine const& x, CombineAfter const& after, Queue const& queue) {
  Sizes const& s = x.sizes;
  auto const matrix = [&](ConstRows const& rows, int64_t width) {
    return Matrix<T const>{static_cast<T const*>(rows.data), row_stride(rows, width)};
  };
  Args<T> const args{.y = matrix(x.y, s.hidden),
                     .residual = matrix(x.residual, s.hidden),
                     .o = {static_cast<T*>(x.o.data), row_stride(x.o, s.hidden)},
                     .slot_row = x.routing.slot_row,
                     .slot_score = static_cast<float const*>(x.routing.slot_score),
                     .token_offsets = x.routing.token_offsets,
                     .residual_scale = static_cast<float const*>(x.residual_scale),
                     .rows = int(s.rows()),
                     .slots = int(s.slot_count()),
                     .top_k = int(s.top_k),
                     .tokens = int(s.tokens),
                     .hidden = int(s.hidden),
                     .early = after.after_few,
                     .late = after.residual_too,
                     .a = static_cast<T const*>(after.a.data),
                     .a_lines = after.a.data == nullptr ? 0 : int(s.intermediate / kLineElements)};
  if (x.router.dlogits.data == nullptr) {
    // A token's columns are split over blocks only where tokens are few.
    int64_t const passes = ceil_div(s.hidden, kThreads * 8);
    int64_t const parts = s.tokens <= kFewTokens ? std::min(passes, kMostBlocksAlongY) : 1;
    int const threads = threads_of(s.hidden, passes);
    cuda_check(launch_kernel(after.discards ? combine_kernel<T, true> : combine_kernel<T, false>,
                             {.blocks = dim3(unsigned(s.tokens), unsigned(parts)),
                              .threads = threads,
                              .stream = queue.stream,
                              .early = true},
                             args),
               "launch of combine");
    return;
  }
  int const slices = int(ceil_div(s.hidden, kSliceColumns));
  int const width = int(ceil_div(s.hidden / 8, slices)) * 8;
  RouterArgs<T> const router{.dlogits = matrix(x.router.dlogits, s.experts),
                             .weight = matrix(x.router.weight, s.hidden),
                             .ids = x.router.ids,
                             .experts = int(s.experts),
                             .slices = slices,
                             .width = width};
  bool const fits = (s.experts + 1) * width * int64_t(sizeof(T)) <= kMostSharedBytes;
  if (fits && x.routing.token_offsets == nullptr && s.top_k <= 4) {
    launch_with_router<T, true, 4>(args, router, queue);
  } else if (fits) {
    launch_with_router<T, true, 8>(args, router, queue);
  } else {
    launch_with_router<T, false, 8>(args, router, queue);
  }
}

}  // namespace

void require_runnable(Combine const& x) {
  check(x);
  require_16_bit(x.dtype);
  require_whole_16_bytes(x.sizes.hidden, "hidden");
  require_at_most(x.sizes.slot_count(), kMostCounted, "slots");
  require_aligned(x.y, "y");
  require_aligned(x.residual, "residual");
  require_aligned(x.router.weight, "router.weight");
  require_aligned(x.o, "o");
  if (x.router.dlogits.data != nullptr) {
    addressable_stride(x.sizes.rows(), row_stride(x.y, x.sizes.hidden), "y");
  }
}

bool can_discard(Sizes const& sizes, void const* a, void const* y) {
  auto const by_lines = [](void const* rows, int64_t width) {
    return width % kLineElements == 0 && uintptr_t(rows) % kLineBytes == 0;
  };
  return by_lines(a, sizes.intermediate) && by_lines(y, sizes.hidden);
}

void combine(Combine const& x, Queue queue) { combine(x, {}, queue); }

void combine(Combine const& x, CombineAfter const& after, Queue const& queue) {
  require_runnable(x);
  if (x.sizes.tokens == 0) return;
  with_type(x.dtype, [&](auto element) { combine_as<decltype(element)>(x, after, queue); });
  cuda_check(cudaGetLastError(), "launch of combine");
}

}  // namespace guild::cuda
