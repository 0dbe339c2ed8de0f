// The two backends behind one interface, and buffers in their memory that detect stray writes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "guild/float8_chunks.h"
#include "guild/microscaling.h"
#include "guild/steps.h"
#include "number.h"

namespace guild::test {

using AnyStep =
    std::variant<Route, RouterGradient, TokenRounding, BalanceSums, BalanceGradient, Sort,
                 UpProjection, DownProjection, Combine, DownGradient, ScoreGradient, UpGradient,
                 UpWeightGradient, DownWeightGradient, BiasGradient, GroupedGemm, QuantizeRows,
                 QuantizeWeights, QuantizeChunks, ChunkProduct, ScaledGroupedGemm, ScaledUp,
                 ScaledDownGradient, QuantizeMicro, RegroupMicro, MoeForward, MoeBackward,
                 MoeWeightGradients>;

class Device {
 public:
  virtual ~Device() = default;
  virtual void* allocate(int64_t bytes) = 0;  // null if memory is short
  virtual void release(void* memory) = 0;
  virtual void upload(void* to, void const* from, int64_t bytes) = 0;
  virtual void download(void* to, void const* from, int64_t bytes) = 0;
  virtual void run(AnyStep const& step) = 0;  // and waits for it
};

Device& cpu_device();
// Null, with the reason, where there is no CUDA in this build or no device to run it.
Device* cuda_device(char const** why);

// Bytes in a device's memory between two canaries. release() and move only.
class Bytes {
 public:
  Bytes(Device& device, int64_t size);
  Bytes(Bytes&& other) noexcept;
  Bytes& operator=(Bytes&& other) = delete;
  ~Bytes();

  void* data() const { return memory_ + kCanaryBytes; }
  int64_t size() const { return size_; }
  void write(std::vector<std::byte> const& content);
  std::vector<std::byte> read() const;
  bool canaries_alive() const;

 private:
  static constexpr int64_t kCanaryBytes = 256;

  Device& device_;
  int64_t size_;
  std::byte* memory_;
};

// A matrix of `rows` x `cols` whose rows lie `stride` elements apart. Everything in its memory that
// is not one of its elements is NaN, and so are its elements until they are written.
class Tensor {
 public:
  Tensor(Device& device, DType dtype, int64_t rows, int64_t cols, int64_t stride = 0);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DType dtype() const { return dtype_; }
  void* data() const { return empty() ? nullptr : bytes_.data(); }
  bool empty() const { return rows_ * cols_ == 0; }
  Rows view() const { return {data(), stride_}; }

  void poison();
  void set(std::vector<double> const& values);  // rows * cols of them, representable
  std::vector<double> get() const;
  std::vector<std::byte> raw() const { return bytes_.read(); }
  // Canaries, padding and every row from `used` on are as they were made.
  void expect_untouched_from(int64_t used, char const* name) const;

 private:
  int64_t elements() const { return rows_ == 0 ? 0 : (rows_ - 1) * stride_ + cols_; }

  DType dtype_;
  int64_t rows_, cols_, stride_;
  Bytes bytes_;
  std::vector<std::byte> poisoned_;
};

// int32 or int64 indices.
template <class I>
class Indices {
 public:
  Indices(Device& device, int64_t count) : count_(count), bytes_(device, count * sizeof(I)) {
    std::vector<I> const poison(count, I(0x5a5a5a5a));
    set(poison);
  }
  Indices(Device& device, std::vector<I> const& values) : Indices(device, int64_t(values.size())) {
    set(values);
  }
  void set(std::vector<I> const& values) {
    auto const* const first = reinterpret_cast<std::byte const*>(values.data());
    bytes_.write({first, first + values.size() * sizeof(I)});
  }
  std::vector<I> get() const {
    auto const raw = bytes_.read();
    auto const* const first = reinterpret_cast<I const*>(raw.data());
    return {first, first + count_};
  }
  std::vector<std::byte> raw() const { return bytes_.read(); }
  I* data() const { return static_cast<I*>(bytes_.data()); }
  bool canaries_alive() const { return bytes_.canaries_alive(); }

 private:
  int64_t count_;
  Bytes bytes_;
};

}  // namespace guild::test
