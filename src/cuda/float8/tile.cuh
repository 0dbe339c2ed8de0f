// A 128 x 128 tile of a matrix, held in a thread block's registers: quantised with one scale and
// stored both as it is and transposed ("turned").
//
// Thread t has the 8 x 8 patch at row 8 (t / 16) and column 8 (t % 16). Memory is read once, with
// 16-byte loads where it is aligned.
#pragma once
#include <cuda_fp8.h>

#include "cuda/element.cuh"
#include "cuda/warp.cuh"
#include "guild/float8.h"
#include "shared/float8.h"

namespace guild::cuda {

inline constexpr int kTileThreads = 256, kPatch = 8;

__device__ inline int patch_row() { return int(threadIdx.x / 16u) * kPatch; }
__device__ inline int patch_column() { return int(threadIdx.x % 16u) * kPatch; }

// ---- elements -----------------------------------------------------------------------------------

// The bits of |x|: they compare as the values do, with infinity above these and NaN above that.
__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }

// Four codes of consecutive elements.
template <Float8 format>
__device__ inline uint32_t encode_four(float x0, float x1, float x2, float x3) {
  constexpr auto kind = format == Float8::e4m3 ? __NV_E4M3 : __NV_E5M2;
  uint32_t const low = __nv_cvt_float2_to_fp8x2({x0, x1}, __NV_SATFINITE, kind);
  uint32_t const high = __nv_cvt_float2_to_fp8x2({x2, x3}, __NV_SATFINITE, kind);
  return low | high << 16;
}
template <Float8 format>
__device__ inline uint2 encode_eight(Eight const& x, float factor) {
  float const* v = x.value;
  return {encode_four<format>(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor),
          encode_four<format>(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor)};
}

// Four codes' values.
template <Float8 format>
__device__ inline float4 decode_four(uint32_t codes) {
  constexpr auto kind = format == Float8::e4m3 ? __NV_E4M3 : __NV_E5M2;
  auto const pair = [](uint32_t two) {
    __half2_raw const half = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(two), kind);
    return __half22float2(__half2(half));
  };
  float2 const low = pair(codes & 0xffff), high = pair(codes >> 16);
  return {low.x, low.y, high.x, high.y};
}

// Calls f with an element of x's type, which is not float64.
template <class F>
void with_element(DType dtype, F&& f) {
  if (dtype == DType::float32) {
    f(float());
  } else {
    with_type(dtype, f);
  }
}

// Calls f(std::integral_constant<Float8, format>{}).
template <class F>
void with_format(Float8 format, F&& f) {
  if (format == Float8::e4m3) {
    f(std::integral_constant<Float8, Float8::e4m3>{});
  } else {
    f(std::integral_constant<Float8, Float8::e5m2>{});
  }
}

// ---- reading ------------------------------------------------------------------------------------

// Eight elements of a row as memory has them.
template <class T>
struct Raw {
  uint4 words[sizeof(T) / 2];
};

template <class T>
__device__ inline Eight unpack_raw(Raw<T> const& raw) {
  if constexpr (sizeof(T) == 2) {
    return unpack_eight<T>(raw.words[0]);
  } else {
    Eight e;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      e.value[4 * i] = __uint_as_float(raw.words[i].x);
      e.value[4 * i + 1] = __uint_as_float(raw.words[i].y);
      e.value[4 * i + 2] = __uint_as_float(raw.words[i].z);
      e.value[4 * i + 3] = __uint_as_float(raw.words[i].w);
    }
    return e;
  }
}

// The distance between a row's elements in memory:
//   next    contiguous
//   second  every second element, as gate and up alternate: `from` is where both begin
//   any     any stride
enum class Steps : int { next, second, any };

// Loads eight elements from `from` on; those at or past `count` become zeros. Except with
// Steps::any, all or none of them exist. odd: with Steps::second, which of each two elements.
template <class T, Steps steps>
__device__ inline Raw<T> load_raw(T const* from, int64_t distance, int count, bool odd) {
  Raw<T> raw{};
  if (count <= 0) return raw;
  constexpr int words = sizeof(T) / 2;
  if constexpr (steps == Steps::next) {
#pragma unroll
    for (int i = 0; i < words; ++i) raw.words[i] = reinterpret_cast<uint4 const*>(from)[i];
  } else if constexpr (steps == Steps::second) {
    uint32_t const* const all = reinterpret_cast<uint32_t const*>(&raw);
    uint32_t* const to = const_cast<uint32_t*>(all);
#pragma unroll
    for (int i = 0; i < 2 * words; ++i) {
      uint4 const both = reinterpret_cast<uint4 const*>(from)[i];
      if constexpr (sizeof(T) == 2) {
        unsigned const which = odd ? 0x7632 : 0x5410;
        to[2 * i] = __byte_perm(both.x, both.y, which);
        to[2 * i + 1] = __byte_perm(both.z, both.w, which);
      } else {
        to[2 * i] = odd ? both.y : both.x;
        to[2 * i + 1] = odd ? both.w : both.z;
      }
    }
  } else {
    T* const to = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) to[i] = from[i * distance];
    }
  }
  return raw;
}

// ---- the tile's scale ---------------------------------------------------------------------------

template <class T>
__device__ inline uint32_t largest_magnitude(Raw<T> const (&raw)[kPatch]) {
  uint32_t largest = 0;
#pragma unroll
  for (auto const& row : raw) {
    Eight const e = unpack_raw<T>(row);
#pragma unroll
    for (float const x : e.value) largest = max(largest, magnitude(x));
  }
  return largest;
}

// The largest of all threads' values.
__device__ inline uint32_t largest_of_threads(uint32_t value,
                                              uint32_t (&warps)[kTileThreads / 32]) {
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (uint32_t const of_warp : warps) value = max(value, of_warp);
  return value;
}

// ---- writing ------------------------------------------------------------------------------------

// Stores the first `count` of up to eight bytes.
__device__ inline void store_bytes(uint8_t* to, uint2 bytes, int count) {
  uint64_t const all = uint64_t(bytes.y) << 32 | bytes.x;
  for (int i = 0; i < count; ++i) to[i] = uint8_t(all >> 8 * i);
}

// A matrix of codes with contiguous columns. aligned: rows begin on 16-byte boundaries. streams:
// use streaming stores, to leave L2 to data that is read.
struct CodeRows {
  uint8_t* data;
  int64_t stride;
  bool aligned, streams = false;
};

// Codes of a thread's patch, row by row.
using PatchCodes = uint2[kPatch];

// Stores the patch, of which `rows` x `columns` exist, at the tile's first element.
__device__ inline void store_patch(PatchCodes const& codes, CodeRows const& to, int rows,
                                   int columns) {
  int const left = columns - patch_column();
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    if (patch_row() + i >= rows || left <= 0) continue;
    uint8_t* const row = to.data + (patch_row() + i) * to.stride + patch_column();
    if (to.aligned && left >= 8) {
      *reinterpret_cast<uint2*>(row) = codes[i];
    } else {
      uint64_t const all = uint64_t(codes[i].y) << 32 | codes[i].x;  // store_bytes() would spill
      for (int j = 0; j < min(left, 8); ++j) row[j] = uint8_t(all >> 8 * j);
    }
  }
}

// Byte i of word j becomes byte j of word i.
__device__ inline uint4 turn_four(uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  uint32_t const a = __byte_perm(r0, r1, 0x5140), b = __byte_perm(r2, r3, 0x5140);
  uint32_t const c = __byte_perm(r0, r1, 0x7362), d = __byte_perm(r2, r3, 0x7362);
  return {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
          __byte_perm(c, d, 0x7632)};
}

// A tile of 128 x `width` codes in shared memory, transposed: its columns are rows of 128 bytes,
// and 16 threads side by side hold its columns. 8-byte pieces are permuted within a row so that
// neither writing patches nor reading rows causes bank conflicts.
template <int width>
struct TurnedTile {
  static constexpr int kOfThread = width / 16;  // columns
  alignas(16) uint8_t bytes[width * kScaleBlock];

  // Eight rows, from patch_row() on, of eight of the thread's columns.
  __device__ void put(int column, PatchCodes const& codes) {
    int const piece = patch_row() / 8, second = piece % 2 ^ in_second_half(column);
    uint8_t* const first = bytes + at(column, piece / 2) + 8 * second;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t r[kPatch];
#pragma unroll
      for (int i = 0; i < kPatch; ++i) r[i] = half ? codes[i].y : codes[i].x;
      uint4 const low = turn_four(r[0], r[1], r[2], r[3]);
      uint4 const high = turn_four(r[4], r[5], r[6], r[7]);
      uint2 const turned[4] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint2*>(first + (4 * half + i) * int(kScaleBlock)) = turned[i];
      }
    }
  }

  // 16 codes from row 16 * unit on of column first + i * step, where first < step. The offset from
  // column `first` is a compile-time constant.
  template <int step>
  __device__ uint4 take(int first, int i, int unit) const {
    static_assert(step == 32 && kOfThread <= step);
    unsigned const place = at(first, unit) ^ unsigned(i * step / kOfThread % 8 * 16);
    uint4 const words = *reinterpret_cast<uint4 const*>(bytes + place + i * step * kScaleBlock);
    return in_second_half(i * step) ? uint4{words.z, words.w, words.x, words.y} : words;
  }

 private:
  // Unsigned, so that quotients are shifts.
  static __device__ int in_second_half(unsigned column) { return column / (width / 2); }
  static __device__ int at(unsigned column, unsigned unit) {
    return column * unsigned(kScaleBlock) + (unit ^ column / kOfThread % 8) * 16;
  }
};

// Stores the turned tile, of which `rows` x `columns` exist before turning.
template <int width>
__device__ inline void store_turned(TurnedTile<width> const& tile, CodeRows const& to, int rows,
                                    int columns) {
  constexpr int step = kTileThreads / 8;
  int const unit = int(threadIdx.x % 8u), left = rows - 16 * unit;
  int const first = int(threadIdx.x / 8u % step);  // of kTileThreads: below `step` anyway
  uint8_t* const start = to.data + first * to.stride + 16 * unit;
#pragma unroll
  for (int i = 0; i < width / step; ++i) {
    if (first + i * step >= columns || left <= 0) continue;
    uint4 const words = tile.template take<step>(first, i, unit);
    uint8_t* const row = start + i * step * to.stride;
    if (to.aligned && left >= 16) {
      auto* const all = reinterpret_cast<uint4*>(row);
      if (to.streams) {
        __stcs(all, words);
      } else {
        *all = words;
      }
    } else {
      uint32_t const w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (j < left) row[j] = uint8_t(w[j / 4] >> 8 * (j % 4));
      }
    }
  }
}

}  // namespace guild::cuda
