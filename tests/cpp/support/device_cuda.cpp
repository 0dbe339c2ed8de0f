// The current CUDA device as a test device.
#include <cuda_runtime_api.h>

#include <string>

#include "device.h"
#include "guild/cuda.h"

namespace guild::test {

namespace {

void must(cudaError_t status, char const* what) {
  require(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

struct CudaCalls {
  void operator()(Route const& x) const { cuda::route(x); }
  void operator()(RouterGradient const& x) const { cuda::router_gradient(x); }
  void operator()(TokenRounding const& x) const { cuda::round_tokens(x); }
  void operator()(BalanceSums const& x) const { cuda::balance_sums(x); }
  void operator()(BalanceGradient const& x) const { cuda::balance_gradient(x); }
  void operator()(Sort const& x) const { cuda::sort_by_expert(x); }
  void operator()(UpProjection const& x) const { cuda::up_projection(x); }
  void operator()(DownProjection const& x) const { cuda::down_projection(x); }
  void operator()(Combine const& x) const { cuda::combine(x); }
  void operator()(DownGradient const& x) const { cuda::down_gradient(x); }
  void operator()(ScoreGradient const& x) const { cuda::score_gradient(x); }
  void operator()(UpGradient const& x) const { cuda::up_gradient(x); }
  void operator()(UpWeightGradient const& x) const { cuda::up_weight_gradient(x); }
  void operator()(DownWeightGradient const& x) const { cuda::down_weight_gradient(x); }
  void operator()(BiasGradient const& x) const { cuda::bias_gradient(x); }
  void operator()(GroupedGemm const& x) const { cuda::grouped_gemm(x); }
  void operator()(QuantizeRows const& x) const { cuda::quantize_rows(x); }
  void operator()(QuantizeWeights const& x) const { cuda::quantize_weights(x); }
  void operator()(QuantizeChunks const& x) const { cuda::quantize_chunks(x); }
  void operator()(ChunkProduct const& x) const { cuda::chunk_product(x); }
  void operator()(ScaledGroupedGemm const& x) const { cuda::scaled_grouped_gemm(x); }
  void operator()(ScaledUp const& x) const { cuda::scaled_up(x); }
  void operator()(ScaledDownGradient const& x) const { cuda::scaled_down_gradient(x); }
  void operator()(QuantizeMicro const& x) const { cuda::quantize_micro(x); }
  void operator()(RegroupMicro const& x) const { cuda::regroup_micro(x); }
  void operator()(MoeForward const& x) const { cuda::moe_forward(x); }
  void operator()(MoeBackward const& x) const { cuda::moe_backward(x); }
  void operator()(MoeWeightGradients const& x) const { cuda::moe_weight_gradients(x); }
};

class Cuda : public Device {
 public:
  void* allocate(int64_t bytes) override {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();
    return nullptr;
  }
  void release(void* memory) override { cudaFree(memory); }
  void upload(void* to, void const* from, int64_t bytes) override {
    must(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "upload");
  }
  void download(void* to, void const* from, int64_t bytes) override {
    must(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "download");
  }
  void run(AnyStep const& step) override {
    std::visit(CudaCalls{}, step);
    must(cudaGetLastError(), "launch");
    must(cudaDeviceSynchronize(), "kernel");
  }
};

}  // namespace

Device* cuda_device(char const** why) {
  static Cuda device;
  return cuda::usable(why) ? &device : nullptr;
}

}  // namespace guild::test
