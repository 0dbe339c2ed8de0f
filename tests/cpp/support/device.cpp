// Buffers, and the CPU as a device.
#include "device.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "guild/cpu.h"

namespace guild::test {

namespace {

constexpr std::byte kCanary{0xa5};

struct CpuCalls {
  void operator()(Route const& x) const { cpu::route(x); }
  void operator()(RouterGradient const& x) const { cpu::router_gradient(x); }
  void operator()(TokenRounding const& x) const { cpu::round_tokens(x); }
  void operator()(BalanceSums const& x) const { cpu::balance_sums(x); }
  void operator()(BalanceGradient const& x) const { cpu::balance_gradient(x); }
  void operator()(Sort const& x) const { cpu::sort_by_expert(x); }
  void operator()(UpProjection const& x) const { cpu::up_projection(x); }
  void operator()(DownProjection const& x) const { cpu::down_projection(x); }
  void operator()(Combine const& x) const { cpu::combine(x); }
  void operator()(DownGradient const& x) const { cpu::down_gradient(x); }
  void operator()(ScoreGradient const& x) const { cpu::score_gradient(x); }
  void operator()(UpGradient const& x) const { cpu::up_gradient(x); }
  void operator()(UpWeightGradient const& x) const { cpu::up_weight_gradient(x); }
  void operator()(DownWeightGradient const& x) const { cpu::down_weight_gradient(x); }
  void operator()(BiasGradient const& x) const { cpu::bias_gradient(x); }
  void operator()(GroupedGemm const& x) const { cpu::grouped_gemm(x); }
  void operator()(QuantizeRows const& x) const { cpu::quantize_rows(x); }
  void operator()(QuantizeWeights const& x) const { cpu::quantize_weights(x); }
  void operator()(QuantizeChunks const& x) const { cpu::quantize_chunks(x); }
  void operator()(ChunkProduct const& x) const { cpu::chunk_product(x); }
  void operator()(ScaledGroupedGemm const& x) const { cpu::scaled_grouped_gemm(x); }
  void operator()(ScaledUp const& x) const { cpu::scaled_up(x); }
  void operator()(ScaledDownGradient const& x) const { cpu::scaled_down_gradient(x); }
  void operator()(QuantizeMicro const& x) const { cpu::quantize_micro(x); }
  void operator()(RegroupMicro const& x) const { cpu::regroup_micro(x); }
  void operator()(MoeForward const& x) const { cpu::moe_forward(x); }
  void operator()(MoeBackward const& x) const { cpu::moe_backward(x); }
  void operator()(MoeWeightGradients const& x) const { cpu::moe_weight_gradients(x); }
};

class Cpu : public Device {
 public:
  void* allocate(int64_t bytes) override {
    return std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  }
  void release(void* memory) override { std::free(memory); }
  void upload(void* to, void const* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);  // pointers may be null for 0 bytes
  }
  void download(void* to, void const* from, int64_t bytes) override { upload(to, from, bytes); }
  void run(AnyStep const& step) override { std::visit(CpuCalls{}, step); }
};

}  // namespace

Device& cpu_device() {
  static Cpu cpu;
  return cpu;
}

Bytes::Bytes(Device& device, int64_t size) : device_(device), size_(size) {
  memory_ = static_cast<std::byte*>(device.allocate(size + 2 * kCanaryBytes));
  if (memory_ == nullptr) throw std::bad_alloc();
  std::vector<std::byte> const canaries(size + 2 * kCanaryBytes, kCanary);
  device.upload(memory_, canaries.data(), int64_t(canaries.size()));
}

Bytes::Bytes(Bytes&& other) noexcept
    : device_(other.device_), size_(other.size_), memory_(std::exchange(other.memory_, nullptr)) {}

Bytes::~Bytes() {
  if (memory_ != nullptr) device_.release(memory_);
}

void Bytes::write(std::vector<std::byte> const& content) {
  if (!content.empty()) device_.upload(data(), content.data(), int64_t(content.size()));
}

std::vector<std::byte> Bytes::read() const {
  std::vector<std::byte> content(size_);
  if (size_ > 0) device_.download(content.data(), data(), size_);
  return content;
}

bool Bytes::canaries_alive() const {
  std::vector<std::byte> all(size_ + 2 * kCanaryBytes);
  device_.download(all.data(), memory_, int64_t(all.size()));
  for (int64_t i = 0; i < kCanaryBytes; ++i) {
    if (all[i] != kCanary || all[all.size() - 1 - i] != kCanary) return false;
  }
  return true;
}

Tensor::Tensor(Device& device, DType dtype, int64_t rows, int64_t cols, int64_t stride)
    : dtype_(dtype),
      rows_(rows),
      cols_(cols),
      stride_(stride == 0 ? cols : stride),
      bytes_(device, elements() * bytes_of(dtype)),
      poisoned_(bytes_.size()) {
  double const nan = std::numeric_limits<double>::quiet_NaN();
  for (int64_t i = 0; i < elements(); ++i) encode(dtype, nan, &poisoned_[i * bytes_of(dtype)]);
  poison();
}

void Tensor::poison() { bytes_.write(poisoned_); }

void Tensor::set(std::vector<double> const& values) {
  ASSERT_EQ(int64_t(values.size()), rows_ * cols_);
  std::vector<std::byte> content = poisoned_;
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t c = 0; c < cols_; ++c) {
      encode(dtype_, values[r * cols_ + c], &content[(r * stride_ + c) * bytes_of(dtype_)]);
    }
  }
  bytes_.write(content);
}

std::vector<double> Tensor::get() const {
  auto const content = bytes_.read();
  std::vector<double> values(rows_ * cols_);
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t c = 0; c < cols_; ++c) {
      values[r * cols_ + c] = decode(dtype_, &content[(r * stride_ + c) * bytes_of(dtype_)]);
    }
  }
  return values;
}

void Tensor::expect_untouched_from(int64_t used, char const* name) const {
  EXPECT_TRUE(bytes_.canaries_alive()) << name << ": written past its ends";
  auto const content = bytes_.read();
  int64_t const size = bytes_of(dtype_);
  for (int64_t i = 0; i < elements(); ++i) {
    int64_t const row = i / stride_, col = i % stride_;
    if (row < used && col < cols_) continue;
    ASSERT_EQ(std::memcmp(&content[i * size], &poisoned_[i * size], size), 0)
        << name << ": row " << row << ", column " << col << " was written; " << used << " rows of "
        << cols_ << " are in use";
  }
}

}  // namespace guild::test
