// push() by token: sends the sum over a token's rows on this rank to the rank that owns the token.
//
//   out[t] = sum over k of score[p, k] * y[row_of[p, k]], in the order of k, fp32
//
// A warp takes a token or, where tokens are few, a part of its columns, 1,024 bytes of each row at
// a time. TMA loads these into the warp's part of shared memory a few steps ahead of the additions,
// across tokens. An SM thus has more bytes in flight than registers could hold, and issues little
// but the additions.
#include <algorithm>

#include "cuda/alignment.h"
#include "cuda/arch/bulk.cuh"
#include "cuda/arch/dependent_launch.cuh"
#include "cuda/element.cuh"
#include "cuda/exchange/copies.h"
#include "cuda/exchange/pool.cuh"
#include "cuda/launch.h"
#include "cuda/shared_memory.h"
#include "shared/peer_memory.h"
#include "shared/routing.h"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;  // at most
constexpr int kPiece = 1024;                           // bytes of a row in a step
constexpr int kUnits = kPiece / 16, kOfLane = kUnits / 32;
constexpr int kSlots = 12;  // pieces of a warp
constexpr int kMost = 8;    // pieces of a step
constexpr int kSteps = 4;   // whose pieces are in flight or being added
constexpr int kAtOnce = 4;  // pieces that a lane loads before it adds them

struct Staging {  // of a warp
  uint4 pieces[kSlots][kUnits];
  Barrier arrived[kSteps], added[kSteps];  // of steps
};
constexpr int bytes_of(int warps) { return warps * int(sizeof(Staging)); }

// A token and, in lane l, its slot number first + l.
struct TokenSlots {
  PoolToken at;
  SlotSpan slots;
  int row = -1;
  float score = 1;

  __device__ TokenSlots(Push const& x, int i)
      : at(x.memory, i, /*others=*/false),
        slots(slots_of(x.token_offsets, x.rows, x.top_k, at.place(x.memory))) {
    look_up(x, 0);
  }
  __device__ void look_up(Push const& x, int64_t first) {
    int64_t const slot = slots.begin + first + threadIdx.x % 32;
    bool const there = slot < slots.end;
    row = there ? x.row_of[slot] : -1;
    if (unsigned(row) >= unsigned(x.rows)) row = -1;
    if (x.scores != nullptr) score = there ? static_cast<float const*>(x.scores)[slot] : 0.f;
  }
};

// Any number of slots, 32 at a time for each column.
template <class T>
__device__ void push_many(Push const& x, T* out, T const* y, int64_t stride, int units,
                          TokenSlots& token) {
  int const lane = threadIdx.x % 32;
  for (int base = 0; base < units; base += 32) {
    int const unit = base + lane;
    Eight sum{};
    bool any = false;
    for (int64_t first = 0; token.slots.begin + first < token.slots.end; first += 32) {
      token.look_up(x, first);
      unsigned there = __ballot_sync(~0u, token.row >= 0);
      any |= there != 0;
      for (; there != 0; there &= there - 1) {
        int const from = __ffs(int(there)) - 1;
        int64_t const row = __shfl_sync(~0u, token.row, from);
        float const factor = __shfl_sync(~0u, token.score, from);
        if (unit >= units) continue;
        Eight const e = load_eight(y + row * stride + unit * 8);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum.value[j] += factor * e.value[j];
      }
    }
    if (any && unit < units) store_eight(out + unit * 8, sum);
  }
}

// A token of at most 32 slots and which of its pieces come next.
struct Walk {
  int i = 0;           // the share's number; none: that of all shares
  unsigned there = 0;  // slots that have a row here
  int row = -1;        // of this lane's slot
  float score = 0;
  int piece = 0, first = 0;  // of the pieces: which of a row, and from which row on
  int begin = 0, end = 0;    // of the share

  __device__ int rows() const { return __popc(there); }
  __device__ int count() const { return min(kMost, rows() - first); }
  __device__ void step() {
    first += kMost;
    if (first >= rows()) first = 0, ++piece;
  }
};

// A warp's tokens, one after the other.
template <class T>
class Tokens {
 public:
  __device__ Tokens(Push const& x, PeerLayout const& layout, TokenShares const& shares, T const* y,
                    int64_t stride)
      : x_(x),
        layout_(layout),
        shares_(shares),
        y_(y),
        stride_(stride),
        count_(PoolToken::count(x.memory, /*others=*/false) * shares.parts),
        step_(int(gridDim.x * blockDim.x) / 32),
        rest_from_(x.part == Part::whole ? 0 : *x.rest_from),
        next_(shares.first(int(blockIdx.x), int(threadIdx.x) / 32)),
        coming_(x, min(next_, count_ - 1) / shares.parts) {}

  // The share of the next token in this call's part that has rows on this rank. Tokens with more
  // than 32 slots all belong to Part::rest, or Part::whole, and are summed right here.
  __device__ Walk next() {
    while (next_ < count_) {
      TokenSlots token = coming_;
      int const i = next_;
      next_ += step_;
      // Loaded while this one is added.
      coming_ = TokenSlots(x_, min(next_, count_ - 1) / shares_.parts);
      unsigned const there = __ballot_sync(~0u, token.row >= 0);
      bool const many = token.slots.end - token.slots.begin > 32;
      if (x_.part != Part::whole) {
        bool const rest = many || __any_sync(~0u, token.row >= rest_from_);
        if (rest != (x_.part == Part::rest)) continue;
      }
      int const begin = i % shares_.parts * shares_.per;
      if (many) {
        if (begin == 0) push_many(x_, out_of(token.at), y_, stride_, int(x_.hidden / 8), token);
      } else if (there != 0) {
        return {.i = i,
                .there = there,
                .row = token.row,
                .score = token.score,
                .piece = begin,
                .begin = begin,
                .end = min(begin + shares_.per, shares_.pieces)};
      }
    }
    return {.i = count_};
  }
  __device__ bool has(Walk const& walk) const { return walk.i < count_; }
  __device__ T* out_of(PoolToken const& at) const {
    int64_t const to = x_.memory.rank * x_.tokens[at.source] + at.token;
    PeerView const peer(layout_, x_.memory, at.source);
    return reinterpret_cast<T*>(peer.returned()) + to * x_.hidden;
  }
  __device__ T* out_of(Walk const& walk) const {
    return out_of(PoolToken(x_.memory, walk.i / shares_.parts, /*others=*/false));
  }

 private:
  Push const& x_;
  PeerLayout const& layout_;
  TokenShares const& shares_;
  T const* y_;
  int64_t stride_;
  int count_, step_, rest_from_, next_;
  TokenSlots coming_;
};

// A warp's pieces in shared memory: those of a step follow each other, as do the steps.
struct Ring {
  uint4 (*pieces)[kUnits];
  Barrier *arrived, *added;
  int head = 0, tail = 0, used = 0;          // pieces
  unsigned copied = 0, read = 0, freed = 0;  // steps

  __device__ bool fits(int count) const {
    return used + count <= kSlots && copied - read < unsigned(kSteps);
  }
  __device__ static int wrapped(int at) { return at < kSlots ? at : at - kSlots; }

  template <class T>
  __device__ void copy(Walk const& walk, T const* y, int64_t stride, int row_bytes) {
    int const lane = threadIdx.x % 32, count = walk.count(), at = walk.piece * kPiece;
    int const bytes = min(kPiece, row_bytes - at);
    int const mine = __popc(walk.there & ((1u << lane) - 1)) - walk.first;
    // Waits until what TMA overwrites has been read.
    for (; freed < read; ++freed) added[freed % kSteps].wait(freed / kSteps % 2);
    uint32_t const done = shared_address(&arrived[copied % kSteps].word);
    if (lane == 0) arrived[copied % kSteps].arrive_expect(unsigned(count * bytes));
    __syncwarp();
    if (walk.row >= 0 && mine >= 0 && mine < count) {
      void const* const from = reinterpret_cast<char const*>(y + walk.row * stride) + at;
      bulk_load(shared_address(pieces[wrapped(head + mine)]), from, unsigned(bytes), done);
    }
    head = wrapped(head + count);
    used += count;
    ++copied;
  }

  // sum += score * piece, in the order of the slots.
  template <class T>
  __device__ void add(Walk const& walk, Eight (&sum)[kOfLane]) {
    int const lane = threadIdx.x % 32, count = walk.count();
    unsigned left = walk.there;
    for (int k = 0; k < walk.first; ++k) left &= left - 1;
    arrived[read % kSteps].wait(read / kSteps % 2);
    for (int k = 0; k < count; k += kAtOnce) {
      uint4 words[kAtOnce][kOfLane];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (k + j >= count) break;
        uint4 const* const piece = pieces[wrapped(tail + k + j)] + lane;
#pragma unroll
        for (int u = 0; u < kOfLane; ++u) words[j][u] = piece[32 * u];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (k + j >= count) break;
        float const factor = __shfl_sync(~0u, walk.score, __ffs(int(left)) - 1);
        left &= left - 1;
#pragma unroll
        for (int u = 0; u < kOfLane; ++u) {
          Eight const e = unpack_eight<T>(words[j][u]);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[u].value[i] += factor * e.value[i];
        }
      }
    }
    fence_async_proxy();  // these reads before what TMA writes to the same place
    added[read % kSteps].arrive();
    tail = wrapped(tail + count);
    used -= count;
    ++read;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) push_kernel(Push x, PeerLayout layout,
                                                           TokenShares shares, int64_t stride) {
  extern __shared__ __align__(128) unsigned char memory[];
  int const lane = int(threadIdx.x) % 32;
  Staging& staging = reinterpret_cast<Staging*>(memory)[threadIdx.x / 32];
  PeerMemory const& m = x.memory;
  if (lane < kSteps) {
    staging.arrived[lane].init(1);
    staging.added[lane].init(32);  // all lanes read
  }
  fence_barrier_init();
  __syncwarp();
  PeerControl const* const own = PeerView(layout, m, m.rank).control();
  wait_for_previous();
  let_next_start();
  if (own->failure != 0) return;
  int const row_bytes = int(x.hidden) * 2;
  T const* const y = static_cast<T const*>(x.y.data);
  Tokens<T> tokens(x, layout, shares, y, stride);
  Ring ring{staging.pieces, staging.arrived, staging.added};
  Walk adding = tokens.next(), copying = adding;
  Eight sum[kOfLane] = {};
  while (tokens.has(adding)) {
    while (tokens.has(copying) && copying.piece < copying.end && ring.fits(copying.count())) {
      ring.copy(copying, y, stride, row_bytes);
      copying.step();
      if (copying.piece == copying.end && copying.i == adding.i) copying = tokens.next();
    }
    ring.template add<T>(adding, sum);
    int const piece = adding.piece;
    adding.step();
    if (adding.piece == piece) continue;
    T* const out = tokens.out_of(adding) + piece * (kPiece / 2);
#pragma unroll
    for (int u = 0; u < kOfLane; ++u) {
      int const column = 8 * (lane + 32 * u);
      if (piece * kPiece + column * 2 < row_bytes) store_eight(out + column, sum[u]);
      sum[u] = {};
    }
    if (adding.piece < adding.end) continue;
    adding = copying;  // already another share, or none
    adding.piece = adding.begin, adding.first = 0;
    if (copying.piece == copying.end) copying = tokens.next();
  }
}

}  // namespace

void push_sums(Push const& x, Queue const& queue, cudaEvent_t begun) {
  int64_t const tokens = x.memory.ranks * x.memory.tokens, stride = row_stride(x.y, x.hidden);
  int const pieces = int(ceil_div(x.hidden * 2, kPiece));
  bool const early = begun == nullptr && few_blocks_suffice(tokens * pieces, kWarps, queue);
  TokenShares const shares = TokenShares::of(tokens, pieces, kWarps, most_blocks(early, queue));
  Launch const launch{.blocks = unsigned(shares.blocks),
                      .threads = 32 * shares.warps,
                      .bytes = bytes_of(shares.warps),
                      .stream = queue.stream,
                      .early = early,
                      .begun = begun};
  with_type(x.dtype, [&](auto element) {
    auto const kernel = push_kernel<decltype(element)>;
    static AllowedOn allowed;
    allow_shared_memory(kernel, bytes_of(kWarps), allowed, "shared memory of push");
    cuda_check(launch_kernel(kernel, launch, x, layout_of(x.memory), shares, stride),
               "launch of push");
  });
}

}  // namespace guild::cuda
