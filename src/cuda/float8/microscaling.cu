// quantize_micro(), regroup_micro(): eight elements a thread, a block's threads side by side in a
// warp.
#include "shared/microscaling.h"

#include "check_microscaling.h"
#include "cuda/device.h"
#include "cuda/float8/tile.cuh"
#include "shared/tiles.h"

namespace guild::cuda {
namespace {

constexpr int kThreads = 256;
// Units that a thread works on at once: enough loads in flight to keep memory busy.
constexpr int kAtOnce = 4;

// Four scales of a row, which are stored as one word where they can be.
template <Microscaling micro>
struct Unit {
  static constexpr int kOfBlock = int(micro_block(micro)) / 8;  // threads of a block
  static constexpr int kOfUnit = 4 * kOfBlock;
  static constexpr int kColumns = 8 * kOfUnit;
};

// MXFP8's codes.
constexpr Float8 codes_of(Microscaling micro) {
  return micro == Microscaling::mxfp8_e5m2 ? Float8::e5m2 : Float8::e4m3;
}

struct MicroArgs {
  QuantizeMicro x;
  int64_t x_stride, codes_stride;
  int64_t count;     // of units, those that fill up tiles of scales included
  unsigned units;    // of a row
  int64_t blocks;    // of a row
  bool wide_codes;   // eight codes are stored at once
  bool wide_scales;  // four scales are
};

// The largest magnitude among the threads of a block.
template <int threads>
__device__ uint32_t largest_of_block(Eight const& e) {
  uint32_t largest = 0;
#pragma unroll
  for (float const value : e.value) largest = max(largest, magnitude(value));
#pragma unroll
  for (int lanes = threads / 2; lanes > 0; lanes /= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
  }
  return largest;
}

__device__ uint32_t encode_eight_e2m1(Eight const& e, float factor) {
  uint32_t word = 0;
  if (factor == 0) return word;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= uint32_t(encode_e2m1(e.value[i] * factor)) << 4 * i;
  return word;
}

// Stores the first `count` of up to eight bytes.
__device__ void store_bytes(uint8_t* to, uint2 bytes, int count) {
  uint64_t const all = uint64_t(bytes.y) << 32 | bytes.x;
  for (int i = 0; i < count; ++i) to[i] = uint8_t(all >> 8 * i);
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
__device__ void store_scale(MicroArgs const& a, int64_t row, unsigned unit, uint8_t code) {
  using U = Unit<micro>;
  int const thread = threadIdx.x % U::kOfUnit, within = thread / U::kOfBlock;
  uint32_t word = uint32_t(code) << 8 * within;
#pragma unroll
  for (int lanes = U::kOfBlock; lanes < U::kOfUnit; lanes *= 2) {
    word |= __shfl_xor_sync(~0u, word, lanes);
  }
  int64_t const block = int64_t(unit) * 4 + within;
  bool const padded = a.x.order == ScaleOrder::swizzled;
  if (a.wide_scales) {
    if (thread != 0 || (row >= a.x.rows && !padded)) return;
    *reinterpret_cast<uint32_t*>(a.x.scales + scale_place(a.x.order, row, block, a.blocks)) = word;
  } else if (thread % U::kOfBlock == 0 && row < a.x.rows && block < a.blocks) {
    a.x.scales[scale_place(a.x.order, row, block, a.blocks)] = code;
  }
}

template <class T, Steps steps, Microscaling micro>
__global__ void __launch_bounds__(kThreads) micro_kernel(MicroArgs const a) {
  using U = Unit<micro>;
  constexpr int stride = kThreads / U::kOfUnit;
  int const own = threadIdx.x % U::kOfUnit * 8;
  int64_t const first = int64_t(blockIdx.x) * (stride * kAtOnce) + threadIdx.x / U::kOfUnit;
  float global = 1;
  if constexpr (micro == Microscaling::nvfp4) {
    global = a.x.global_given ? *a.x.global : nvfp4_global(__uint_as_float(*a.x.workspace));
    if (!a.x.global_given && blockIdx.x == 0 && threadIdx.x == 0) *a.x.global = global;
  }
  Raw<T> raw[kAtOnce];
  int64_t row[kAtOnce];
  unsigned unit[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    int64_t const index = min(first + i * stride, a.count - 1);
    row[i] = index < 1ll << 32 ? unsigned(index) / a.units : index / a.units;
    unit[i] = unsigned(index - row[i] * a.units);
    int const column = int(unit[i]) * U::kColumns + own;
    T const* const from = static_cast<T const*>(a.x.x.data) + row[i] * a.x_stride + column;
    raw[i] = load_raw<T, steps>(from, 1, row[i] < a.x.rows ? int(a.x.columns) - column : 0, false);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    Eight const e = unpack_raw<T>(raw[i]);
    float const largest = __uint_as_float(largest_of_block<U::kOfBlock>(e));
    MicroScale scale;
    if constexpr (micro == Microscaling::nvfp4) {
      scale = nvfp4_scale(largest, global);
    } else {
      scale = mx_scale(largest, codes_of(micro), a.x.rounding);
    }
    bool const exists = first + i * stride < a.count;
    store_scale<micro>(a, exists ? row[i] : a.x.rows + (int64_t(1) << 40), unit[i], scale.code);
    if (exists) store_codes<micro>(a, row[i], int(unit[i]) * U::kColumns + own, e, scale.to_code);
  }
}

// The largest magnitude of the blocks that are finite, to workspace, which holds 0 before.
template <class T, Steps steps>
__global__ void __launch_bounds__(kThreads) largest_kernel(MicroArgs const a) {
  using U = Unit<Microscaling::nvfp4>;
  constexpr int stride = kThreads / U::kOfUnit;
  __shared__ uint32_t warps[kTileThreads / 32];
  int const own = threadIdx.x % U::kOfUnit * 8;
  uint32_t largest = 0;
  for (int64_t first = int64_t(blockIdx.x) * (stride * kAtOnce) + threadIdx.x / U::kOfUnit;
       first - threadIdx.x / U::kOfUnit < a.count; first += int64_t(gridDim.x) * stride * kAtOnce) {
    Raw<T> raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int64_t const index = min(first + i * stride, a.count - 1);
      int64_t const row = index < 1ll << 32 ? unsigned(index) / a.units : index / a.units;
      int const column = int(index - row * a.units) * U::kColumns + own;
      T const* const from = static_cast<T const*>(a.x.x.data) + row * a.x_stride + column;
      raw[i] = load_raw<T, steps>(from, 1, row < a.x.rows ? int(a.x.columns) - column : 0, false);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      uint32_t const of_block = largest_of_block<U::kOfBlock>(unpack_raw<T>(raw[i]));
      if (of_block < 0x7f800000) largest = max(largest, of_block);
    }
  }
  static_assert(kThreads == kTileThreads);
  largest = cuda::largest_of_block(largest, warps);
  if (threadIdx.x == 0) atomicMax(a.x.workspace, largest);
}

template <class T, Steps steps>
void launch(MicroArgs const& a, Queue const& queue) {
  auto const run = [&](auto kernel, int of_unit) {
    int64_t const grid = ceil_div(a.count, kThreads / of_unit * kAtOnce);
    require(grid <= (int64_t(1) << 31) - 1, "rows: expected fewer than 2^31 blocks, got ", grid);
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

// ---- regrouping
// ----------------------------------------------------------------------------------

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
  auto const shift = [&](uint32_t four) {
    float4 const v = decode_four<format>(four);
    return encode_four<format>(v.x * quotient, v.y * quotient, v.z * quotient, v.w * quotient);
  };
  codes = {shift(codes.x), shift(codes.y)};
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
  MicroArgs a{.x = x,
              .x_stride = x.x.stride == 0 ? x.columns : x.x.stride,
              .codes_stride = x.codes.stride == 0 ? width : x.codes.stride};
  a.blocks = ceil_div(x.columns, micro_block(x.format));
  a.units = unsigned(ceil_div(a.blocks, 4));
  a.count = (swizzled ? ceil_div(x.rows, 128) * 128 : x.rows) * int64_t(a.units);
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
                .x_stride = x.x.stride == 0 ? x.columns : x.x.stride,
                .codes_stride = x.codes.stride == 0 ? x.columns : x.codes.stride};
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
