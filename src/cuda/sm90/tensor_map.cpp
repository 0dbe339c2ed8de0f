// Tensor maps, made by the driver's function, and the shapes of those that several kernels use.
#include "cuda/sm90/tensor_map.h"

#include <array>

#include "cuda/device.h"
#include "cuda/sm90/float8/chunk_map.h"
#include "cuda/sm90/stage_map.h"
#include "shared/dtype.h"

namespace guild::cuda {
namespace {

constexpr int kMostRank = 5;

// Strides are those of the dimensions after the first, which is contiguous.
struct Boxes {
  int rank;
  std::array<int64_t, kMostRank> shape, stride;
  std::array<int, kMostRank> box;
};

CUtensorMap encoded(void const* data, DType dtype, Boxes const& s, char const* name,
                    CUtensorMapL2promotion promotion,
                    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  static auto const encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    require(found == cudaDriverEntryPointSuccess,
            "cuTensorMapEncodeTiled: expected a driver of CUDA 12.0 or later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
  }();
  // For an empty matrix any valid map will do: it is never used.
  void* const base = data == nullptr ? reinterpret_cast<void*>(16) : const_cast<void*>(data);
  cuuint64_t shape[kMostRank], strides[kMostRank];
  cuuint32_t box[kMostRank], step[kMostRank];
  for (int i = 0; i < s.rank; ++i) {
    shape[i] = cuuint64_t(s.shape[i] > 0 ? s.shape[i] : 1);
    strides[i] = cuuint64_t(element_bytes(dtype) * s.stride[i]);
    box[i] = cuuint32_t(s.box[i]);
    step[i] = 1;
  }
  auto const type = dtype == DType::float32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                    : dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  auto const try_encode = [&] {
    return encode(&map, type, cuuint32_t(s.rank), base, shape, strides, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
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
          s.shape[2], ", ", s.shape[1], ", ", s.shape[0], ") with strides (", s.stride[1], ", ",
          s.stride[0], ", 1) at address ", base, " (tensor map error ", int(status), ")");
  return map;
}

Boxes boxes_of(MapShape const& s) {
  return {.rank = s.w > 0 ? 4 : 3,
          .shape = {s.x, s.y, s.z, s.w},
          .stride = {s.y_stride, s.z_stride, s.w_stride},
          .box = {s.box_x, s.box_y, s.box_z, 1}};
}

}  // namespace

CUtensorMap tensor_map(void const* data, DType dtype, MapShape const& s, char const* name) {
  return encoded(data, dtype, boxes_of(s), name, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}
CUtensorMap streamed_map(void const* data, DType dtype, MapShape const& s, char const* name) {
  return encoded(data, dtype, boxes_of(s), name, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}
CUtensorMap stage_map(void const* data, DType dtype, StageShape const& s, char const* name) {
  Boxes const boxes{.rank = 5,
                    .shape = {64, s.rows, s.parts, s.steps, s.experts},
                    .stride = {s.row_stride, s.part_stride, 64, s.expert_stride},
                    .box = {64, s.box_rows, int(s.parts), s.box_steps, 1}};
  return encoded(data, dtype, boxes, name, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}
CUtensorMap group_map(void const* data, DType dtype, GroupShape const& s, char const* name) {
  Boxes const boxes{.rank = 5,
                    .shape = {64, 8, s.steps, s.rows / 8, s.experts},
                    .stride = {s.row_stride, 64, 8 * s.row_stride, s.expert_stride},
                    .box = {64, 8, s.box_steps, s.box_rows / 8, 1}};
  return encoded(data, dtype, boxes, name, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}
CUtensorMap eights_map(void const* data, DType dtype, EightsShape const& s, char const* name) {
  Boxes const boxes{.rank = 5,
                    .shape = {s.k, 8, s.parts, s.rows / 8, s.experts},
                    .stride = {s.row_stride, s.part_stride, s.eight_stride, s.expert_stride},
                    .box = {64, 8, int(s.parts), s.box_rows / 8 / int(s.parts), 1}};
  return encoded(data, dtype, boxes, name, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}
CUtensorMap turned_map(uint8_t const* codes, int64_t columns, int halves, int64_t slots,
                       char const* name) {
  Boxes const boxes{.rank = 4,
                    .shape = {64, columns, halves, slots},
                    .stride = {64, 64 * columns, 64 * columns * halves},
                    .box = {32, 128, 1, 1}};
  return encoded(codes, DType::bfloat16, boxes, name, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                 CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace guild::cuda
