// The device from the host: whether it can be used, how many multiprocessors it has, tensor maps.
#include <mutex>

#include "cuda/sm90/launch.cuh"

namespace guild::cuda {

namespace {

struct Device {
  int multiprocessors = 0, major = 0, minor = 0;
};

int attribute(cudaDeviceAttr which, int index, char const* name) {
  int value = 0;
  cuda_check(cudaDeviceGetAttribute(&value, which, index), name);
  return value;
}

// Attributes of the current device, queried once per device.
Device const& current_device() {
  constexpr int kMost = 64;
  static Device known[kMost];
  static std::once_flag asked[kMost];
  int index = 0;
  cuda_check(cudaGetDevice(&index), "current CUDA device");
  require(index < kMost, "device index ", index, " is not below ", kMost);
  std::call_once(asked[index], [index] {
    known[index] = {attribute(cudaDevAttrMultiProcessorCount, index, "multiprocessor count"),
                    attribute(cudaDevAttrComputeCapabilityMajor, index, "compute capability"),
                    attribute(cudaDevAttrComputeCapabilityMinor, index, "compute capability")};
  });
  return known[index];
}

}  // namespace

bool built() { return true; }

bool usable(char const** why) {
  int devices = 0;
  char const* reason = nullptr;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    cudaGetLastError();
    reason = "no CUDA device or driver";
  } else {
    Device const& d = current_device();
    if (d.major != 9 || d.minor != 0)
      reason = "the current device is not of compute capability 9.0";
  }
  if (why != nullptr) *why = reason == nullptr ? "" : reason;
  return reason == nullptr;
}

int multiprocessors(Queue const& queue) {
  int const all = current_device().multiprocessors;
  return queue.sms > 0 && queue.sms < all ? queue.sms : all;
}

CUtensorMap tensor_map(void const* data, DType dtype, MapShape const& s, char const* name) {
  static auto const encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
  }();
  // For an empty matrix any valid map will do: it is never used.
  void* const base = data == nullptr ? reinterpret_cast<void*>(16) : const_cast<void*>(data);
  auto const extent = [](int64_t n) { return cuuint64_t(n > 0 ? n : 1); };
  cuuint64_t const shape[] = {extent(s.x), extent(s.y), extent(s.z), extent(s.w)};
  cuuint64_t const strides[] = {cuuint64_t(2 * s.y_stride), cuuint64_t(2 * s.z_stride),
                                cuuint64_t(2 * s.w_stride)};
  cuuint32_t const box[] = {cuuint32_t(s.box_x), cuuint32_t(s.box_y), cuuint32_t(s.box_z), 1};
  cuuint32_t const step[] = {1, 1, 1, 1};
  auto const type =
      dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  auto const try_encode = [&] {
    return encode(&map, type, s.w > 0 ? 4 : 3, base, shape, strides, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  auto status = try_encode();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // the thread's first call: make the context current
    int index = 0;
    cuda_check(cudaGetDevice(&index), "current CUDA device");
    cuda_check(cudaSetDevice(index), "current CUDA device");
    status = try_encode();
  }
  require(status == CUDA_SUCCESS, name, ": expected 16-byte aligned data and strides, got shape (",
          s.z, ", ", s.y, ", ", s.x, ") with strides (", s.z_stride, ", ", s.y_stride,
          ", 1) at address ", base, " (tensor map error ", int(status), ")");
  return map;
}

}  // namespace guild::cuda
