// Selects the n-th largest of an array of keys in one block: rules out most keys, then runs a radix
// select on the rest.
//
//   bound     splits the keys into n or more groups. The n-th largest key is no less than the
//             smallest of the groups' maxima, which leaves few more than n keys
//   gather    copies the remaining keys to shared memory, if they fit
//   digits    radix select on the distances from the smallest remaining key, 8 bits per pass, until
//             all or none of a bin are wanted
#pragma once
#include <cstdint>

#include "cuda/warp.cuh"

namespace guild::cuda {

inline constexpr int kSelectThreads = 1024;

// The keys of tokens that are never, and always, taken. Candidates' keys lie between them.
inline constexpr uint32_t kNever = 0, kAlways = ~0u;

// A token is taken if its key is above `key`, or equal to it at an index before `end`.
struct Threshold {
  uint32_t key;
  int end;
  __device__ bool passes(uint32_t other, int at) const {
    return other > key || (other == key && at < end);
  }
};

// Calls f(key) for all keys, by whole warps; with kNever past the last one.
template <class F>
__device__ void for_keys(uint32_t const* keys, int count, F&& f) {
  constexpr int kAtOnce = 8;
  for (int base = 0; base < count; base += kAtOnce * kSelectThreads) {
    uint32_t key[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const at = base + i * kSelectThreads + int(threadIdx.x);
      key[i] = at < count ? keys[at] : kNever;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) f(key[i]);
  }
}

// The range of keys in which the `wanted`-th largest lies.
struct KeyRange {
  uint32_t least, greatest;
};
__device__ inline KeyRange find_range(uint32_t const* keys, int count, int wanted) {
  __shared__ uint32_t least, greatest, bound;
  if (threadIdx.x == 0) least = bound = ~0u, greatest = 0;
  __syncthreads();
  uint32_t low = ~0u, high = 0;
  for_keys(keys, count, [&](uint32_t key) {
    if (key == kNever || key == kAlways) return;
    low = min(low, key);
    high = max(high, key);
  });
  uint32_t best = high;  // of a group of threads
  int groups = kSelectThreads;
  for (int step = 1; step < 32 && groups / 2 >= wanted; step *= 2, groups /= 2) {
    best = max(best, __shfl_xor_sync(~0u, best, step));
  }
  if (groups < wanted) best = 0;
  low = __reduce_min_sync(~0u, low);
  high = __reduce_max_sync(~0u, high);
  best = __reduce_min_sync(~0u, best);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&least, low);
    atomicMax(&greatest, high);
    atomicMin(&bound, best);
  }
  __syncthreads();
  return {max(least, bound), greatest};
}

// Keys in shared memory, or still in `keys` where they are more than `room`.
struct KeySpan {
  uint32_t const* keys;
  int count;
};
__device__ inline KeySpan gather(uint32_t const* keys, int count, KeyRange range, uint32_t* into,
                                 int room) {
  __shared__ int gathered;
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) gathered = 0;
  __syncthreads();
  for_keys(keys, count, [&](uint32_t key) {
    bool const kept = key >= range.least && key <= range.greatest;
    unsigned const keep = __ballot_sync(~0u, kept);
    if (keep == 0) return;
    int first = lane == 0 ? atomicAdd(&gathered, __popc(keep)) : 0;
    first = __shfl_sync(~0u, first, 0) + __popc(keep & ((1u << lane) - 1));
    if (kept && first < room) into[first] = key;
  });
  __syncthreads();
  return gathered <= room ? KeySpan{into, gathered} : KeySpan{keys, count};
}

// The bin of a histogram in which the `wanted`-th largest lies, how many of the bin are wanted, and
// how many it has. Aligned, so that it is read with one instruction.
struct alignas(16) RadixBin {
  int bin, wanted, count;
};
// Called by the first warp. bins: (256).
__device__ inline RadixBin find_bin(int const* bins, int wanted) {
  int const lane = threadIdx.x;
  int part = 0;  // of bins 255 - 8 lane down to 248 - 8 lane
  for (int i = 0; i < 8; ++i) part += bins[255 - 8 * lane - i];
  int const through = warp_scan(part);
  unsigned const reached = __ballot_sync(~0u, through >= wanted);
  int const at = reached == 0 ? 31 : __ffs(reached) - 1;
  int left = wanted - __shfl_sync(~0u, through - part, at), bin = 255 - 8 * at;
  for (int i = 0; i < 7 && left > bins[bin]; ++i) left -= bins[bin--];
  return {bin, left, bins[bin]};
}

// The index after the `wanted`-th key that equals `key`.
__device__ inline int end_of_ties(uint32_t const* keys, int count, uint32_t key, int wanted) {
  __shared__ int warp_counts[32], found;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int before = 0;  // in earlier iterations
  for (int base = 0; base < count; base += kSelectThreads) {
    int const at = base + int(threadIdx.x);
    bool const equal = at < count && keys[at] == key;
    unsigned const equals = __ballot_sync(~0u, equal);
    if (lane == 0) warp_counts[warp] = __popc(equals);
    __syncthreads();
    int const mine = warp_counts[lane];
    int const all = __reduce_add_sync(~0u, mine);
    int const earlier = __reduce_add_sync(~0u, lane < warp ? mine : 0);
    int const rank = before + earlier + __popc(equals & ((1u << lane) - 1));
    if (equal && rank == wanted - 1) found = at + 1;
    before += all;
    __syncthreads();
    if (before >= wanted) break;
  }
  return found;
}

// The threshold that the `wanted` best of more candidates pass; of equal keys, the first ones.
__device__ inline Threshold find_threshold(uint32_t const* keys, int count, int wanted) {
  constexpr int kRoom = 4096;
  __shared__ uint32_t room[kRoom];
  __shared__ int bins[256];
  __shared__ RadixBin chosen;
  int const thread = threadIdx.x;
  KeyRange const range = find_range(keys, count, wanted);
  KeySpan const left = gather(keys, count, range, room, kRoom);
  uint32_t least = range.least, span = range.greatest - range.least;  // of the keys still open
  int wanted_of_open = wanted;
  for (int shift = max(0, 24 - __clz(int(span)));; shift = max(0, shift - 8)) {
    if (thread < 256) bins[thread] = 0;
    __syncthreads();
    for_keys(left.keys, left.count, [&](uint32_t key) {
      uint32_t const from_least = key - least;  // more than span for kNever, kAlways
      if (from_least <= span) atomicAdd(&bins[from_least >> shift], 1);
    });
    __syncthreads();
    if (thread < 32) {
      RadixBin const found = find_bin(bins, wanted_of_open);
      if (thread == 0) chosen = found;
    }
    __syncthreads();
    RadixBin const bin = chosen;
    least += uint32_t(bin.bin) << shift;
    span = min((1u << shift) - 1, range.greatest - least);
    wanted_of_open = bin.wanted;
    if (bin.wanted == bin.count) return {least, count};  // all of the digit
    if (shift == 0) break;
  }
  return {least, end_of_ties(keys, count, least, wanted_of_open)};
}

}  // namespace guild::cuda
