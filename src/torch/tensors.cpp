// Checks of tensors and views of them; see tensors.h.
#include "torch/tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <ostream>
#include <vector>

// A torch without CUDA has no such function; there is no CUDA tensor then to ask for it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace guild::binding {

namespace {

// Sizes as Python prints them; written only into the message of an error.
struct Text {
  int64_t const* values;
  int64_t count;

  friend std::ostream& operator<<(std::ostream& out, Text const& text) {
    out << '(';
    for (int64_t i = 0; i < text.count; ++i) out << (i ? ", " : "") << text.values[i];
    return out << (text.count == 1 ? ",)" : ")");
  }
};

Text shape_text(Tensor const& tensor) { return {tensor.sizes().data(), tensor.dim()}; }
Text stride_text(Tensor const& tensor) { return {tensor.strides().data(), tensor.dim()}; }

int32_t type_code(Tensor const& tensor) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

int32_t type_code(DType dtype) {
  if (dtype == DType::float32) return aoti_torch_dtype_float32();
  if (dtype == DType::bfloat16) return aoti_torch_dtype_bfloat16();
  return dtype == DType::float16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_float64();
}

char const* type_text(DType dtype) {
  char const* const names[] = {"float32", "bfloat16", "float16", "float64"};
  return names[int(dtype)];
}

struct DeviceText {
  int32_t type, index;

  friend std::ostream& operator<<(std::ostream& out, DeviceText const& device) {
    if (device.type == aoti_torch_device_type_cpu()) return out << "cpu";
    if (device.type == aoti_torch_device_type_cuda()) return out << "cuda:" << device.index;
    return out << "device type " << device.type;
  }
};

// Throws unless the current device, cuda:index, can run the kernels; checks once per device.
void require_usable_gpu(int32_t index, char const* name) {
  static std::atomic<uint64_t> known{0};
  uint64_t const bit = uint64_t(1) << (index & 63);
  if (known.load(std::memory_order_relaxed) & bit) return;
  char const* why = nullptr;
  require(cuda::usable(&why), name, ": expected a CPU tensor, or one on a GPU that this build of ",
          "Guild runs on, got cuda:", index, " (", why == nullptr ? "" : why, ")");
  known.fetch_or(bit, std::memory_order_relaxed);
}

std::atomic<int> sm_budget{0};
std::atomic<bool> sms_shared{false};

}  // namespace

DType dtype_of(Tensor const& tensor, char const* name) {
  int32_t const code = type_code(tensor);
  for (DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::float64}) {
    if (code == type_code(dtype)) return dtype;
  }
  require(false, name, ": expected dtype bfloat16, float16, float32 or float64, got torch type ",
          code);
  return DType::float32;
}

bool is_int64(Tensor const& tensor, char const* name) {
  int32_t const code = type_code(tensor);
  require(code == aoti_torch_dtype_int32() || code == aoti_torch_dtype_int64(), name,
          ": expected dtype int32 or int64, got torch type ", code);
  return code == aoti_torch_dtype_int64();
}

void require_dims(Tensor const& tensor, char const* name, int64_t dims) {
  require(tensor.dim() == dims, name, ": expected ", dims, " dimensions, got shape ",
          shape_text(tensor));
}

int64_t length_of(Tensor const& list, char const* name) {
  require_dims(list, name, 1);
  return list.size(0);
}

Tensor empty_like(Tensor const& like) { return torch::stable::empty_like(like); }

int64_t matrix_stride(Tensor const& tensor) {
  if (tensor.size(0) != 1) return tensor.stride(0);
  return std::max(tensor.size(1) * tensor.stride(1), tensor.size(2) * tensor.stride(2));
}

void set_num_sms(int64_t count, bool shared) {
  require(count >= 0, "num_sms: expected 0 (all) or more, got ", count);
  sms_shared.store(shared, std::memory_order_relaxed);
  sm_budget.store(int(std::min(count, int64_t(INT_MAX))), std::memory_order_relaxed);
}

int64_t num_sms() { return sm_budget.load(std::memory_order_relaxed); }

// ---- place --------------------------------------------------------------------------------------

Place::Place(Tensor const& tensor, char const* name) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type_));
  device_index_ = tensor.get_device_index();
  on_cuda_ = device_type_ == aoti_torch_device_type_cuda();
  require(on_cuda_ || device_type_ == aoti_torch_device_type_cpu(), name,
          ": expected a CPU or CUDA tensor, got ", DeviceText{device_type_, device_index_});
  if (!on_cuda_) return;
  guard_.emplace(device_index_);
  require_usable_gpu(device_index_, name);
  require(aoti_torch_get_current_cuda_stream != nullptr, name, ": this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index_, &stream));
  queue_.stream = static_cast<CUstream_st*>(stream);
  queue_.sms = int(num_sms());
  queue_.shared = sms_shared.load(std::memory_order_relaxed);
}

Tensor Place::make(int64_t const* sizes, int64_t dims, int32_t type) const {
  std::vector<int64_t> strides(dims);
  int64_t step = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return make(sizes, strides.data(), dims, type);
}

Tensor Place::make(int64_t const* sizes, int64_t const* strides, int64_t dims, int32_t type) const {
  AtenTensorHandle handle = nullptr;
  bool const made = aoti_torch_empty_strided(dims, sizes, strides, type, device_type_,
                                             device_index_, &handle) == TORCH_SUCCESS;
  // torch has printed its own reason; its exception cannot cross the stable ABI. Python knows this
  // one by how it begins (python/guild/_torch/library.py).
  require(made, on_cuda_ ? "CUDA out of memory: " : "",
          "torch could not allocate a tensor of shape ", Text{sizes, dims}, " on ",
          DeviceText{device_type_, device_index_});
  return Tensor(handle);
}

Tensor Place::empty(Shape shape, DType dtype) const {
  return make(shape.begin(), int64_t(shape.size()), type_code(dtype));
}

Tensor Place::empty_int32(Shape shape) const {
  return make(shape.begin(), int64_t(shape.size()), aoti_torch_dtype_int32());
}

void Place::clear(Tensor const& tensor) const {
  TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(tensor.get()));
}

Tensor Place::workspace(int64_t bytes) const { return make(&bytes, 1, aoti_torch_dtype_uint8()); }

Tensor Place::aligned(Tensor const& rows) const {
  if (!on_cuda_ || rows.dim() != 2) return rows;
  bool const begins = reinterpret_cast<uintptr_t>(rows.data_ptr()) % 16 == 0;
  bool const steps = rows.size(0) <= 1 || rows.stride(0) % kElementsPer16Bytes == 0;
  return begins && steps ? rows : torch::stable::clone(rows);
}

Tensor Place::first_int32(Tensor const& buffer, int64_t count) const {
  int64_t const stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__alloc_from_pool(buffer.get(), 0, aoti_torch_dtype_int32(), 1,
                                                     &count, &stride, &handle));
  return Tensor(handle);
}

Tensor Place::stacked_like(Tensor const& weight) const {
  int64_t const rows = weight.size(1), columns = weight.size(2);
  bool const by_columns = weight.stride(1) < weight.stride(2);
  int64_t const strides[] = {rows * columns, by_columns ? 1 : columns, by_columns ? rows : 1};
  return make(weight.sizes().data(), strides, 3, type_code(weight));
}

Tensor Place::view(Tensor const& first, Shape sizes, Shape strides) const {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(first.get(), &type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      first.data_ptr(), int64_t(sizes.size()), sizes.begin(), strides.begin(),
      /*storage_offset=*/0, type, device_type_, device_index_, &handle));
  return Tensor(handle);
}

void Place::copy_indices(int32_t const* from, int64_t count, int32_t* to) const {
  if (on_cuda_) return cuda::copy_indices(from, count, to, queue_);
  std::copy_n(from, count, to);
}

void* Place::data(Tensor const& tensor, char const* name, Shape shape) const {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  int32_t const index = tensor.get_device_index();
  require(type == device_type_ && index == device_index_, name, ": expected a tensor on ",
          DeviceText{device_type_, device_index_}, ", got one on ", DeviceText{type, index});
  bool same = tensor.dim() == int64_t(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) {
    same = tensor.size(int64_t(i)) == shape.begin()[i];
  }
  require(same, name, ": expected shape ", Text{shape.begin(), int64_t(shape.size())}, ", got ",
          shape_text(tensor));
  int64_t stored = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &stored));
  require(stored > 0 || tensor.numel() == 0, name,
          ": expected values in memory, got an empty storage (as of sharded parameters)");
  return tensor.data_ptr();
}

void* Place::typed(Tensor const& tensor, char const* name, DType dtype, Shape shape) const {
  void* const pointer = data(tensor, name, shape);
  DType const got = dtype_of(tensor, name);
  require(got == dtype, name, ": expected dtype ", type_text(dtype), ", got ", type_text(got));
  return pointer;
}

void* Place::packed(Tensor const& tensor, char const* name, DType dtype, Shape shape) const {
  void* const pointer = typed(tensor, name, dtype, shape);
  require(tensor.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
          stride_text(tensor));
  return pointer;
}

int32_t* Place::indices(Tensor const& tensor, char const* name, Shape shape) const {
  void* const pointer = data(tensor, name, shape);
  require(type_code(tensor) == aoti_torch_dtype_int32(), name, ": expected dtype int32, got torch ",
          "type ", type_code(tensor));
  require(tensor.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
          stride_text(tensor));
  return static_cast<int32_t*>(pointer);
}

int64_t const* Place::seed(Tensor const& tensor, char const* name) const {
  void const* const pointer = data(tensor, name, {1});
  int32_t const code = type_code(tensor);
  require(code == aoti_torch_dtype_int64(), name, ": expected dtype int64, got torch type ", code);
  return static_cast<int64_t const*>(pointer);
}

int32_t const* Place::lists(MaybeTensor const& tensor, char const* name, int64_t lists,
                            int64_t experts) const {
  return tensor.has_value() ? indices(*tensor, name, {lists, experts}) : nullptr;
}

uint8_t* Place::flags(Tensor const& tensor, char const* name, Shape shape) const {
  void* const pointer = data(tensor, name, shape);
  require(type_code(tensor) == aoti_torch_dtype_bool(), name, ": expected dtype bool, got torch ",
          "type ", type_code(tensor));
  require(tensor.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
          stride_text(tensor));
  return static_cast<uint8_t*>(pointer);
}

uint8_t* Place::bytes(Tensor const& tensor, char const* name, Shape shape) const {
  void* const pointer = data(tensor, name, shape);
  require(type_code(tensor) == aoti_torch_dtype_uint8(), name,
          ": expected dtype uint8 (a view of the codes), got torch type ", type_code(tensor));
  return static_cast<uint8_t*>(pointer);
}

Rows Place::rows(Tensor const& tensor, char const* name, DType dtype, Shape shape) const {
  void* const pointer = typed(tensor, name, dtype, shape);
  require(shape.size() == 2, name, ": expected 2 dimensions, got shape ", shape_text(tensor));
  int64_t const count = shape.begin()[0], width = shape.begin()[1];
  bool const packed = count <= 1 || width == 0;  // the stride between rows is then never used
  require(width <= 1 || count == 0 || tensor.stride(1) == 1, name,
          ": expected contiguous columns (stride 1), got strides ", stride_text(tensor));
  require(packed || tensor.stride(0) >= width, name,
          ": expected rows that do not overlap, got strides ", stride_text(tensor));
  return {pointer, packed ? 0 : tensor.stride(0)};
}

Rows Place::rows(MaybeTensor const& tensor, char const* name, DType dtype, Shape shape) const {
  return tensor.has_value() ? rows(*tensor, name, dtype, shape) : Rows{};
}

Weight Place::weight(Tensor const& tensor, char const* name, DType dtype, Shape shape,
                     bool transposed) const {
  void* const pointer = typed(tensor, name, dtype, shape);
  return {pointer, matrix_stride(tensor), tensor.stride(transposed ? 2 : 1),
          tensor.stride(transposed ? 1 : 2)};
}

// ---- layer --------------------------------------------------------------------------------------

Activation activation_of(int64_t kind, bool gated, double alpha, double limit, double up_offset,
                         bool clamp_after) {
  require(kind >= 0 && kind <= int64_t(Activation::Kind::relu_squared),
          "activation kind: expected 0 .. 4, got ", kind);
  if (limit >= double(std::numeric_limits<float>::max())) limit = Activation().limit;
  return {Activation::Kind(kind), gated, alpha, limit, up_offset, clamp_after};
}

Routing routing_of(Place const& place, Sizes const& s, Tensor const& offsets,
                   MaybeTensor const& row_token, MaybeTensor const& row_score, DType scores) {
  Routing routing;
  routing.offsets = place.indices(offsets, "offsets", {s.experts + 1});
  if (row_token.has_value()) {
    routing.row_token = place.indices(*row_token, "row_token", {s.rows()});
  }
  if (row_score.has_value()) {
    routing.row_score = place.packed(*row_score, "row_score", scores, {s.rows()});
  }
  return routing;
}

UpWeight up_weight_of(Place const& place, Layer const& layer, Tensor const& w_up,
                      MaybeTensor const& w_gate, DType dtype) {
  Sizes const& s = layer.sizes;
  int64_t const width = w_gate.has_value() ? s.intermediate : layer.width();
  auto const view = [&](Tensor const& tensor, char const* name, int list) {
    Weight weight = layer.transposed
                        ? place.weight(tensor, name, dtype, {s.experts, s.hidden, width}, true)
                        : place.weight(tensor, name, dtype, {s.experts, width, s.hidden}, false);
    weight.expert_at = layer.expert_at(list);
    return weight;
  };
  if (w_gate.has_value()) {
    require(layer.activation.gated, "w_gate: expected none with an activation without a gate");
    return {view(*w_gate, "w_gate", Layer::kGate), view(w_up, "w_up", Layer::kUp)};
  }
  Weight gate = view(w_up, "w_up", Layer::kUp);
  Weight up = gate;
  if (!layer.activation.gated) return {gate, up};
  bool const alternate = layer.order == GateUp::interleaved;
  int64_t const offset = gate.out_stride * (alternate ? 1 : s.intermediate);
  if (alternate) gate.out_stride = up.out_stride = 2 * gate.out_stride;
  if (up.data != nullptr) {
    up.data = static_cast<char*>(up.data) + offset * int64_t(w_up.element_size());
  }
  return {gate, up};
}

Weight down_weight_of(Place const& place, Layer const& layer, Tensor const& w_down, DType dtype) {
  Sizes const& s = layer.sizes;
  Weight weight =
      layer.transposed
          ? place.weight(w_down, "w_down", dtype, {s.experts, s.intermediate, s.hidden}, true)
          : place.weight(w_down, "w_down", dtype, {s.experts, s.hidden, s.intermediate}, false);
  weight.expert_at = layer.expert_at(Layer::kDown);
  return weight;
}

Slots slots_of(Place const& place, Tensor const& tensor, char const* name,
               MaybeTensor const& token_offsets) {
  require_dims(tensor, name, token_offsets.has_value() ? 1 : 2);
  if (!token_offsets.has_value()) return {.tokens = tensor.size(0), .top_k = tensor.size(1)};
  require_dims(*token_offsets, "token_offsets", 1);
  int64_t const ends = token_offsets->size(0);
  require(ends >= 1, "token_offsets: expected tokens + 1 positions, got 0");
  return {.tokens = ends - 1,
          .top_k = 1,
          .count = tensor.size(0),
          .token_offsets = place.indices(*token_offsets, "token_offsets", {ends})};
}

void* Slots::data(Place const& place, Tensor const& tensor, char const* name) const {
  return lists() ? place.data(tensor, name, {count}) : place.data(tensor, name, {tokens, top_k});
}

void* Slots::packed(Place const& place, Tensor const& tensor, char const* name, DType dtype) const {
  return lists() ? place.packed(tensor, name, dtype, {count})
                 : place.packed(tensor, name, dtype, {tokens, top_k});
}

int32_t* Slots::indices(Place const& place, Tensor const& tensor, char const* name) const {
  return lists() ? place.indices(tensor, name, {count})
                 : place.indices(tensor, name, {tokens, top_k});
}

Tensor Slots::empty(Place const& place, DType dtype) const {
  return lists() ? place.empty({count}, dtype) : place.empty({tokens, top_k}, dtype);
}

}  // namespace guild::binding
