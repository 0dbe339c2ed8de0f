#include "cuda/sm90/tensor_map.h"

#include "cuda/device.h"
#include "shared/dtype.h"

namespace guild::cuda {
namespace {

CUtensorMap encoded(void const* data, DType dtype, MapShape const& s, char const* name,
                    CUtensorMapL2promotion promotion) {
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
  auto const bytes = [](int64_t stride) { return cuuint64_t(kElementBytes * stride); };
  cuuint64_t const strides[] = {bytes(s.y_stride), bytes(s.z_stride), bytes(s.w_stride)};
  cuuint32_t const box[] = {cuuint32_t(s.box_x), cuuint32_t(s.box_y), cuuint32_t(s.box_z), 1};
  cuuint32_t const step[] = {1, 1, 1, 1};
  auto const type =
      dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  auto const try_encode = [&] {
    return encode(&map, type, s.w > 0 ? 4 : 3, base, shape, strides, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
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

}  // namespace

CUtensorMap tensor_map(void const* data, DType dtype, MapShape const& s, char const* name) {
  return encoded(data, dtype, s, name, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}
CUtensorMap streamed_map(void const* data, DType dtype, MapShape const& s, char const* name) {
  return encoded(data, dtype, s, name, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace guild::cuda
