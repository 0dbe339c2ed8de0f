// quantize_micro(), regroup_micro(): eight elements per thread; a block's threads are neighbours in
// a warp.
#include "shared/microscaling.h"

#include <algorithm>

#include "checks/microscaling.h"
#include "cuda/device.h"
#include "cuda/float8/rescale.cuh"
#include "shared/ceil_div.h"
#include "shared/row_stride.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;
// Units per thread: enough loads in flight to saturate memory.
constexpr int kAtOnce = 4;

// Four scales of a row, which are stored as one word where they can be.
template <Microscaling micro>
struct Unit {
  static constexpr int kOfBlock = int(micro_block(micro)) / 8;  // threads of a block
  static constexpr int kOfUnit = 4 * kOfBlock;
  static constexpr int kColumns = 8 * kOfUnit;
};

// Division of numbers below 2^31 by a divisor known on the host: Granlund and Montgomery, "Division
// by invariant integers using multiplication", figure 4.1.
struct Divisor {
  unsigned value = 1, factor = 1, shift = 0;

  explicit Divisor(unsigned value) : value(value) {
    while ((uint64_t(1) << shift) < value) ++shift;
    factor = unsigned(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - value)) / value + 1);
  }
  __device__ unsigned quotient(unsigned x) const { return (__umulhi(x, factor) + x) >> shift; }
};

// MXFP8's codes.
constexpr Float8 codes_of(Microscaling micro) {
  return micro == Microscaling::mxfp8_e5m2 ? Float8::e5m2 : Float8::e4m3;
}

struct MicroArgs {
  QuantizeMicro x;
  int64_t x_stride, codes_stride;
  unsigned count;    // of units, those that fill up tiles of scales included
  Divisor units;     // of a row
  unsigned blocks;   // of a row
  bool wide_codes;   // eight codes are stored at once
  bool wide_scales;  // four scales are
};

// The largest magnitude of eight elements: two at a time where they have 16 bits.
template <class T>
__device__ uint32_t largest_of_eight(Raw<T> const& raw) {
  if constexpr (sizeof(T) == 2) {
    constexpr uint32_t mask = 0x7fff7fff;
    uint4 const& w = raw.words[0];
    uint32_t const two =
        __vmaxu2(__vmaxu2(w.x & mask, w.y & mask), __vmaxu2(w.z & mask, w.w & mask));
    float2 const values = unpack<T>(two);
    return max(magnitude(values.x), magnitude(values.y));
  } else {
    Eight const e = unpack_raw<T>(raw);
    uint32_t largest = 0;
#pragma unroll
    for (float const value : e.value) largest = max(largest, magnitude(value));
    return largest;
  }
}

// The same among the threads of a block.
template <int threads, class T>
__device__ uint32_t largest_of_block(Raw<T> const& raw) {
  uint32_t largest = largest_of_eight<T>(raw);
#pragma unroll
  for (int lanes = threads / 2; lanes > 0; lanes /= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
  }
  return largest;
}

// Codes and signs are shifted in separately, four bits per element, and then combined.
__device__ uint32_t encode_eight_e2m1(Eight const& e, float factor) {
  if (factor == 0) return 0;
  uint32_t codes = 0, signs = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    codes = __funnelshift_r(codes, e2m1_bits(e.value[i] * factor), 4);
    signs = __funnelshift_l(__float_as_uint(e.value[7 - i]), signs, 4);
  }
  return (codes & 0x77777777) | (signs & 0x88888888);
}

template <Microscaling micro>
__device__ void store_codes(MicroArgs const& a, int64_t row, int column, Eight const& e,
                            float factor) {
  int const count = min(int(a.x.columns) - column, 8);
  if (row >= a.x.rows || count <= 0) return;
  uint8_t* const to = static_cast<uint8_t*>(a.x.codes.data) + row * a.codes_stride;
  if constexpr (micro == Microscaling::nvfp4) {
    uint32_t const word = encode_eight_e2m1(e, factor);
    if (a.wide_codes && count == 8) {
      *reinterpret_cast<uint32_t*>(to + column / 2) = word;
    } else {
      store_bytes(to + column / 2, {word, 0}, (count + 1) / 2);
    }
  } else {
    uint2 const codes = encode_eight<codes_of(micro)>(e, factor);
    if (a.wide_codes && count == 8) {
      *reinterpret_cast<uint2*>(to + column) = codes;
    } else {
      store_bytes(to + column, codes, count);
    }
  }
}

// Stores the scale that the threads of a block agree on.
template <Microscaling micro>
__device__ void store_scale(MicroArgs const& a, unsigned index, unsigned row, unsigned unit,
                            uint8_t code) {
  using U = Unit<micro>;
  int const thread = threadIdx.x % U::kOfUnit, within = thread / U::kOfBlock;
  uint32_t word = uint32_t(code) << 8 * within;
#pragma unroll
  for (int lanes = U::kOfBlock; lanes < U::kOfUnit; lanes *= 2) {
    word |= __shfl_xor_sync(~0u, word, lanes);
  }
  if (index >= a.count) return;
  if (a.wide_scales) {
    if (thread != 0) return;
    int64_t const at = a.x.order == ScaleOrder::rows
                           ? int64_t(index) * 4
                           : scale_place(a.x.order, row, unit * 4, a.blocks);
    *reinterpret_cast<uint32_t*>(a.x.scales + at) = word;
  } else if (thread % U::kOfBlock == 0 && unit * 4 + within < a.blocks) {
    a.x.scales[int64_t(row) * a.blocks + unit * 4 + within] = code;
  }
}

// A unit's row, which of the row's it is, and this thread's elements of it.
template <class T, Steps steps, Microscaling micro>
struct Loaded {
  unsigned row, unit;
  Raw<T> raw;

  __device__ int column() const {
    return int(unit) * Unit<micro>::kColumns + threadIdx.x % Unit<micro>::kOfUnit * 8;
  }
  __device__ void load(MicroArgs const& a, unsigned index) {
    unsigned const last = min(index, a.count - 1);
    row = a.units.quotient(last);
    unit = last - row * a.units.value;
    T const* const from = static_cast<T const*>(a.x.x.data) + row * a.x_stride + column();
    raw = load_raw<T, steps>(from, 1, row < a.x.rows ? int(a.x.columns) - column() : 0, false);
  }
};

// What elements are multiplied by to get codes, for each of the 256 possible block scales.
struct ToCode {
  float of_scale[256];

  __device__ void fill(float global) {
    static_assert(kThreads == 256);
    of_scale[threadIdx.x] = nvfp4_to_code(uint8_t(threadIdx.x), global);
    __syncthreads();
  }
};

// nvfp4_scale() without its divisions, with the hardware's conversion, which rounds in the same
// way.
__device__ MicroScale scale_of_block(float largest, float global, float inverse,
                                     ToCode const& to_code) {
  uint8_t code = largest == 0 ? 0 : kE4M3NaN;
  if (largest > 0 && below_infinity(largest)) {
    float const ratio = nvfp4_ratio(largest, global, inverse);
    code = __nv_cvt_float_to_fp8(ratio, __NV_SATFINITE, __NV_E4M3);
  }
  return {code, to_code.of_scale[code]};
}

template <class T, Steps steps, Microscaling micro>
__global__ void __launch_bounds__(kThreads) micro_kernel(MicroArgs const a) {
  using U = Unit<micro>;
  constexpr bool narrow = micro == Microscaling::nvfp4;
  constexpr unsigned stride = kThreads / U::kOfUnit;
  __shared__ std::conditional_t<narrow, ToCode, char> to_code;
  unsigned const first = blockIdx.x * (stride * kAtOnce) + threadIdx.x / U::kOfUnit;
  Loaded<T, steps, micro> loaded[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) loaded[i].load(a, first + i * stride);
  float global = 1, inverse = 1;
  if constexpr (narrow) {
    global = a.x.global_given ? *a.x.global : nvfp4_global(__uint_as_float(*a.x.workspace));
    inverse = 1 / global;
    to_code.fill(global);
    if (!a.x.global_given && blockIdx.x == 0 && threadIdx.x == 0) *a.x.global = global;
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    auto const& it = loaded[i];
    float const largest = __uint_as_float(largest_of_block<U::kOfBlock, T>(it.raw));
    MicroScale scale;
    if constexpr (narrow) {
      scale = scale_of_block(largest, global, inverse, to_code);
    } else {
      scale = mx_scale(largest, codes_of(micro), a.x.rounding);
    }
    unsigned const index = first + i * stride;
    store_scale<micro>(a, index, it.row, it.unit, scale.code);
    if (index < a.count) {
      store_codes<micro>(a, it.row, it.column(), unpack_raw<T>(it.raw), scale.to_code);
    }
  }
}

// The largest magnitude of the blocks that are finite, to workspace, which holds 0 before.
template <class T, Steps steps>
__global__ void __launch_bounds__(kThreads) largest_kernel(MicroArgs const a) {
  using U = Unit<Microscaling::nvfp4>;
  constexpr unsigned stride = kThreads / U::kOfUnit;
  __shared__ uint32_t warps[kTileThreads / 32];
  uint32_t largest = 0;
  for (int64_t block = blockIdx.x; block * stride * kAtOnce < a.count; block += gridDim.x) {
    unsigned const first = unsigned(block) * (stride * kAtOnce) + threadIdx.x / U::kOfUnit;
    Loaded<T, steps, Microscaling::nvfp4> loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) loaded[i].load(a, first + i * stride);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      uint32_t const of_block = largest_of_block<U::kOfBlock, T>(loaded[i].raw);
      if (of_block < 0x7f800000) largest = max(largest, of_block);
    }
  }
  static_assert(kThreads == kTileThreads);
  largest = largest_of_threads(largest, warps);
  if (threadIdx.x == 0) atomicMax(a.x.workspace, largest);
}

template <class T, Steps steps>
void launch(MicroArgs const& a, Queue const& queue) {
  auto const run = [&](auto kernel, int of_unit) {
    int64_t const grid = ceil_div(a.count, kThreads / of_unit * kAtOnce);
    kernel<<<unsigned(grid), kThreads, 0, queue.stream>>>(a);
  };
  switch (a.x.format) {
    case Microscaling::mxfp8_e4m3:
      run(micro_kernel<T, steps, Microscaling::mxfp8_e4m3>, 16);
      break;
    case Microscaling::mxfp8_e5m2:
      run(micro_kernel<T, steps, Microscaling::mxfp8_e5m2>, 16);
      break;
    case Microscaling::nvfp4:
      if (!a.x.global_given) {
        cuda_check(cudaMemsetAsync(a.x.workspace, 0, sizeof(uint32_t), queue.stream),
                   "clearing NVFP4's largest value");
        int64_t const grid = std::min<int64_t>(ceil_div(a.count, kThreads / 8 * kAtOnce),
                                               int64_t(multiprocessors(queue)) * 8);
        largest_kernel<T, steps><<<unsigned(grid), kThreads, 0, queue.stream>>>(a);
      }
      run(micro_kernel<T, steps, Microscaling::nvfp4>, 8);
      break;
  }
  cuda_check(cudaGetLastError(), "launch of quantize_micro");
}

// ---- regrouping ---------------------------------------------------------------------------------

struct RegroupArgs {
  RegroupMicro x;
  int64_t x_stride, codes_stride;
  int64_t count;    // of blocks of 128
  unsigned units;   // of a row
  int64_t blocks;   // of 32 of a row
  bool wide_codes;  // eight codes are read and stored at once
};

template <Float8 format>
__global__ void __launch_bounds__(kThreads) regroup_kernel(RegroupArgs const a) {
  constexpr int of_unit = int(kScaleBlock) / 8;
  int64_t const index = int64_t(blockIdx.x) * (kThreads / of_unit) + threadIdx.x / of_unit;
  bool const exists = index < a.count;
  int64_t const at = exists ? index : a.count - 1, row = at / a.units;
  unsigned const unit = unsigned(at - row * a.units);
  int const column = int(unit * kScaleBlock) + threadIdx.x % of_unit * 8;
  int const count = min(int(a.x.columns) - column, 8);
  uint8_t const* const from = static_cast<uint8_t const*>(a.x.x.data) + row * a.x_stride + column;
  uint2 codes{0, 0};
  uint32_t const scale = count > 0 ? a.x.x_scales[row * a.blocks + column / 32] : 0;
  if (a.wide_codes && count == 8) {
    codes = *reinterpret_cast<uint2 const*>(from);
  } else if (count > 0) {
    uint64_t all = 0;
    for (int i = 0; i < count; ++i) all |= uint64_t(from[i]) << 8 * i;
    codes = {uint32_t(all), uint32_t(all >> 32)};
  }
  uint32_t largest = scale;
#pragma unroll
  for (int lanes = of_unit / 2; lanes > 0; lanes /= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
  }
  if (!exists || count <= 0) return;
  if (threadIdx.x % of_unit == 0) {
    a.x.scales.data[row * a.x.scales.row_stride + unit * a.x.scales.col_stride] =
        decode_e8m0(uint8_t(largest));
  }
  float const quotient = e8m0_quotient(uint8_t(scale), uint8_t(largest));
  codes = {rescale_four<format>(codes.x, quotient), rescale_four<format>(codes.y, quotient)};
  uint8_t* const to = static_cast<uint8_t*>(a.x.codes.data) + row * a.codes_stride + column;
  if (a.wide_codes && count == 8) {
    *reinterpret_cast<uint2*>(to) = codes;
  } else {
    store_bytes(to, codes, count);
  }
}

}  // namespace

void quantize_micro(QuantizeMicro const& x, Queue queue) {
  check(x);
  if (x.rows == 0) return;
  bool const narrow = x.format == Microscaling::nvfp4, swizzled = x.order == ScaleOrder::swizzled;
  require(!narrow || x.global_given || x.workspace != nullptr,
          "workspace: expected a pointer for NVFP4, got null");
  int64_t const width = narrow ? x.columns / 2 : x.columns;
  int64_t const blocks = ceil_div(x.columns, micro_block(x.format)), units = ceil_div(blocks, 4);
  int64_t const count = (swizzled ? ceil_div(x.rows, 128) * 128 : x.rows) * units;
  require(count < int64_t(1) << 31, "x: expected fewer than 2^33 blocks, got ", count * 4);
  MicroArgs a{.x = x,
              .x_stride = row_stride(x.x, x.columns),
              .codes_stride = row_stride(x.codes, width),
              .count = unsigned(count),
              .units = Divisor(unsigned(units)),
              .blocks = unsigned(blocks),
              .wide_codes = false,
              .wide_scales = false};
  auto const begins = [](void const* data, int bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
  };
  int const codes_bytes = narrow ? 4 : 8, unit = x.dtype == DType::float32 ? 4 : 8;
  a.wide_codes = begins(x.codes.data, codes_bytes) && a.codes_stride % codes_bytes == 0;
  require(!swizzled || begins(x.scales, 4), "scales: expected 4-byte aligned data, got address ",
          static_cast<void const*>(x.scales));
  a.wide_scales = swizzled || (begins(x.scales, 4) && a.blocks % 4 == 0);
  bool const aligned = begins(x.x.data, 16) && a.x_stride % unit == 0 && x.columns % 8 == 0;
  with_element(x.dtype, [&](auto element) {
    using T = decltype(element);
    aligned ? launch<T, Steps::next>(a, queue) : launch<T, Steps::any>(a, queue);
  });
}

void regroup_micro(RegroupMicro const& x, Queue queue) {
  check(x);
  if (x.rows == 0) return;
  RegroupArgs a{.x = x,
                .x_stride = row_stride(x.x, x.columns),
                .codes_stride = row_stride(x.codes, x.columns)};
  a.units = unsigned(ceil_div(x.columns, kScaleBlock));
  a.blocks = ceil_div(x.columns, 32);
  a.count = x.rows * int64_t(a.units);
  a.wide_codes = (reinterpret_cast<uintptr_t>(x.x.data) | a.x_stride |
                  reinterpret_cast<uintptr_t>(x.codes.data) | a.codes_stride) %
                     8 ==
                 0;
  int64_t const grid = ceil_div(a.count, kThreads * 8 / kScaleBlock);
  require(grid <= (int64_t(1) << 31) - 1, "rows: expected fewer than 2^31 blocks, got ", grid);
  with_format(x.format, [&](auto format) {
    regroup_kernel<format.value><<<unsigned(grid), kThreads, 0, queue.stream>>>(a);
  });
  cuda_check(cudaGetLastError(), "launch of regroup_micro");
}

}  // namespace guild::cuda
