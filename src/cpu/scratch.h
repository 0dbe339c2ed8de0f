// A per-thread bump allocator for a block of work. The memory is reused: a step allocates only when
// a thread's block needs more than any before it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace guild::cpu {

// take() hands out 64-byte aligned pieces that live until the next Scratch of the same thread, or
// until rewind() to a position before them.
class Scratch {
 public:
  Scratch() : chunks_(of_this_thread()) {
    if (chunks_.size() > 1) {  // next time, one chunk holds it all
      size_t const bytes = total();
      chunks_.clear();
      add_chunk(bytes);
    }
  }

  template <class F>
  F* take(int64_t count) {
    size_t const bytes = (size_t(count) * sizeof(F) + 63) / 64 * 64;
    if (chunks_.empty() || used_ + bytes > chunks_.back().bytes) add_chunk(bytes);
    std::byte* const piece = chunks_.back().data + used_;
    used_ += bytes;
    return reinterpret_cast<F*>(piece);
  }

  struct Position {
    size_t chunks, used;
  };
  Position position() const { return {chunks_.size(), used_}; }
  void rewind(Position p) { used_ = p.chunks == chunks_.size() ? p.used : 0; }

 private:
  struct Chunk {
    std::unique_ptr<std::byte[]> memory;
    std::byte* data;  // the first aligned byte of memory
    size_t bytes;     // from data on
  };

  static std::vector<Chunk>& of_this_thread() {
    thread_local std::vector<Chunk> chunks;
    return chunks;
  }

  size_t total() const {
    size_t bytes = 0;
    for (Chunk const& c : chunks_) bytes += c.bytes;
    return bytes;
  }

  void add_chunk(size_t bytes) {  // at least doubles the memory: few chunks, however it is used
    bytes = std::max({bytes, total(), size_t(1) << 16});
    std::unique_ptr<std::byte[]> memory(new std::byte[bytes + 64]);
    auto const address = reinterpret_cast<uintptr_t>(memory.get());
    std::byte* const data = memory.get() + (64 - address % 64) % 64;
    chunks_.push_back({std::move(memory), data, bytes});
    used_ = 0;
  }

  std::vector<Chunk>& chunks_;
  size_t used_ = 0;
};

}  // namespace guild::cpu
