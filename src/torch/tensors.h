// Converts tensors to the core's argument structs and selects the backend of a call.
//
// There is no policy here: a tensor's type, device, shape and strides are checked against what the
// argument requires, and a view of it is made. Uses the LibTorch stable ABI of 2.10.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

#include "guild/guild.h"
#include "shared/dtype.h"

namespace guild::binding {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Shape = std::initializer_list<int64_t>;

// Whether a tensor of ids is int64. Throws, naming the argument, if it is neither that nor int32.
bool is_int64(Tensor const& tensor, char const* name);

// The dtype of a tensor. Throws, naming the argument, if Guild does not support it.
DType dtype_of(Tensor const& tensor, char const* name);

// Sets how many SMs kernels may use (0: all) and whether other kernels run at the same time
// (cuda::Queue::shared). Process-wide, because autograd runs backward on threads of its own.
void set_num_sms(int64_t count, bool shared);
int64_t num_sms();

// Where a call runs: the device of its first tensor. For the duration of the call it makes that
// device current and holds its current stream. It checks that other tensors are on the device and
// allocates outputs there.
class Place {
 public:
  Place(Tensor const& tensor, char const* name);

  template <class Args>
  void run(void (*cpu)(Args const&), void (*cuda)(Args const&, cuda::Queue),
           Args const& args) const {
    on_cuda_ ? cuda(args, queue_) : cpu(args);
  }

  // The same for matrix products, with a counter on the queue.
  template <class Args>
  void run_product(void (*cpu)(Args const&), void (*cuda)(Args const&, cuda::Queue),
                   Args const& args) const {
    if (!on_cuda_) return cpu(args);
    Tensor const counter = empty_int32({1});
    cuda::Queue queue = queue_;
    queue.counter = static_cast<int32_t*>(counter.data_ptr());
    cuda(args, queue);
  }

  bool on_cuda() const { return on_cuda_; }
  cuda::Queue const& queue() const { return queue_; }

  // An uninitialised tensor, which may hold NaN: the caller must write all of it, or document which
  // rows are undefined.
  Tensor empty(Shape shape, DType dtype) const;
  Tensor empty_int32(Shape shape) const;
  void clear(Tensor const& tensor) const;  // to zeros
  Tensor workspace(int64_t bytes) const;
  // A tensor of the first `count` int32 of a contiguous buffer on this device; keeps it alive.
  Tensor first_int32(Tensor const& buffer, int64_t count) const;

  // A new tensor of a weight's shape: evenly spaced matrices, each with the weight's layout.
  Tensor stacked_like(Tensor const& weight) const;

  // A tensor over the memory that begins at the first element of another; does not own it.
  Tensor view(Tensor const& first, Shape sizes, Shape strides) const;

  void copy_indices(int32_t const* from, int64_t count, int32_t* to) const;  // from the host

  // The data of a tensor, checked to be on this device and of this shape, with any strides.
  void* data(Tensor const& tensor, char const* name, Shape shape) const;
  void* typed(Tensor const& tensor, char const* name, DType dtype, Shape shape) const;
  // The same, checked to be contiguous.
  void* packed(Tensor const& tensor, char const* name, DType dtype, Shape shape) const;
  int32_t* indices(Tensor const& tensor, char const* name, Shape shape) const;
  uint8_t* flags(Tensor const& tensor, char const* name, Shape shape) const;  // of bool
  uint8_t* bytes(Tensor const& tensor, char const* name, Shape shape) const;  // uint8, any strides
  int64_t const* seed(Tensor const& tensor, char const* name) const;          // int64 (1)
  // The same, checked to have contiguous columns.
  Rows rows(Tensor const& tensor, char const* name, DType dtype, Shape shape) const;
  Rows rows(MaybeTensor const& tensor, char const* name, DType dtype, Shape shape) const;
  // The rows themselves, or a copy if the GPU kernels cannot read their alignment or strides.
  // Gradients from autograd, for example, may be slices of larger tensors.
  Tensor aligned(Tensor const& rows) const;
  // int32 (lists, experts), or null.
  int32_t const* lists(MaybeTensor const& tensor, char const* name, int64_t lists,
                       int64_t experts) const;
  // A view of one matrix per expert, (experts, out, in), or (experts, in, out) if transposed.
  Weight weight(Tensor const& tensor, char const* name, DType dtype, Shape shape,
                bool transposed) const;

 private:
  Tensor make(int64_t const* sizes, int64_t dims, int32_t type) const;
  Tensor make(int64_t const* sizes, int64_t const* strides, int64_t dims, int32_t type) const;

  bool on_cuda_ = false;
  int32_t device_type_ = 0, device_index_ = 0;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  cuda::Queue queue_;
};

// The sizes, types and layout of a layer, derived from its weights. Place checks the other tensors
// against them.
struct Layer {
  Sizes sizes;
  DType dtype;
  Activation activation;
  GateUp order;
  bool transposed = false;              // weights are (E, in, out)
  int32_t const* experts_at = nullptr;  // (3, E): expert_at of w_up, w_gate and w_down

  int64_t width() const { return sizes.intermediate * (activation.gated ? 2 : 1); }

  enum List { kUp, kGate, kDown, kLists };  // of experts_at
  int32_t const* expert_at(int list) const {
    return experts_at == nullptr ? nullptr : experts_at + list * sizes.experts;
  }
};

// A limit of float32's largest number means no limit, since AOTInductor packages cannot contain
// infinity.
Activation activation_of(int64_t kind, bool gated, double alpha, double limit, double up_offset,
                         bool clamp_after);

inline GateUp order_of(bool interleaved) {
  return interleaved ? GateUp::interleaved : GateUp::concatenated;
}

// Routing's arrays by row, of which row_token and row_score may be absent; scores: the dtype of
// row_score.
Routing routing_of(Place const& place, Sizes const& s, Tensor const& offsets,
                   MaybeTensor const& row_token = std::nullopt,
                   MaybeTensor const& row_score = std::nullopt, DType scores = DType::float32);

// w_up as gate and up: the halves of one packed tensor, or w_gate and w_up where w_gate is given.
UpWeight up_weight_of(Place const& place, Layer const& layer, Tensor const& w_up,
                      MaybeTensor const& w_gate, DType dtype);
Weight down_weight_of(Place const& place, Layer const& layer, Tensor const& w_down, DType dtype);

// The slots of a tensor by slot: (T, K), or (slots) with the token_offsets of lists of any length.
struct Slots {
  int64_t tokens, top_k, count = -1;  // count: Sizes::slots
  int32_t const* token_offsets = nullptr;

  bool lists() const { return count >= 0; }
  int64_t rows() const { return lists() ? count : tokens * top_k; }
  void* data(Place const& place, Tensor const& tensor, char const* name) const;
  void* packed(Place const& place, Tensor const& tensor, char const* name, DType dtype) const;
  int32_t* indices(Place const& place, Tensor const& tensor, char const* name) const;
  Tensor empty(Place const& place, DType dtype) const;
};
Slots slots_of(Place const& place, Tensor const& tensor, char const* name,
               MaybeTensor const& token_offsets);

// Checks the number of dimensions; to be called before sizes are read.
void require_dims(Tensor const& tensor, char const* name, int64_t dims);
// The length of a tensor. Throws unless it has one dimension.
int64_t length_of(Tensor const& list, char const* name);

// A new tensor laid out in memory as `like` is, where that is dense.
Tensor empty_like(Tensor const& like);

// The stride between the matrices of (matrices, rows, columns). For a single matrix it is
// meaningless, so the result is one that keeps the alignment of the other strides.
int64_t matrix_stride(Tensor const& tensor);

}  // namespace guild::binding
