// The router's product on the GPU: its launch, and the sum of the chunks where no router adds them.
#include "cuda/sm90/router/product.cuh"

#include "checks/router_logits.h"
#include "cuda/alignment.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/routing/logit_parts.cuh"
#include "cuda/shared_memory.h"

namespace guild::cuda {
namespace {

void check_on_gpu(RouterLogits const& x) {
  check(x);
  require_16_bit(x.dtype);
  require_routable(x.experts);
  require_whole_16_bytes(x.hidden, "hidden");
  require_aligned(x.x, "x");
  require_aligned(x.weight, "weight");
  if (x.gate.data != nullptr) require_aligned(x.gate, "gate");
}

template <class Params>
void set_results(Params& p, RouterLogits const& x, LogitParts const& to, int64_t stride) {
  p.out = const_cast<float*>(to.data);
  p.part_stride = to.stride;
  p.stride = stride;
  p.in_pairs = stride % 2 == 0 && x.experts % 2 == 0 && reinterpret_cast<uintptr_t>(p.out) % 8 == 0;
}

template <class T, int tokens, int experts>
void launch_product(RouterLogits const& x, LogitParts const& to, int64_t stride,
                    Queue const& queue) {
  using Product = RouterProduct<T, tokens, experts>;
  typename Product::Params p = router_params<Product>(x, to.count);
  set_results(p, x, to, stride);
  constexpr int bytes = sizeof(typename Product::SharedStorage);
  static AllowedOn allowed;
  allow_shared_memory(router_product_kernel<Product>, bytes, allowed,
                      "shared memory of the router's product");
  int64_t const most = int64_t(Product::kAtOnce) * multiprocessors(queue);
  cuda_check(launch_kernel(router_product_kernel<Product>,
                           {.blocks = unsigned(std::min<int64_t>(p.tiles, most)),
                            .threads = Product::kThreads,
                            .bytes = bytes,
                            .stream = queue.stream,
                            .early = true},
                           p),
             "launch of the router's product");
}

// Tiles of so many experts, and the gate's.
int64_t tiles_of(RouterLogits const& x, int experts) {
  return ceil_div(x.experts, experts) + (x.gate.data != nullptr);
}

// Experts per block for few tokens. A block takes an SM to itself, so choose the smaller number
// only if there are no more blocks than SMs.
int experts_of_block(RouterLogits const& x, Queue const& queue) {
  return tiles_of(x, 16) * router_chunks(x.hidden) <= multiprocessors(queue) ? 16 : 32;
}

template <class Product>
void launch_few(RouterLogits const& x, LogitParts const& to, int64_t stride, Queue const& queue) {
  typename Product::Params p = few_router_params<Product>(x);
  set_results(p, x, to, stride);
  static AllowedOn allowed;
  allow_shared_memory(router_product_of_few_kernel<Product>, Product::kMostBytes, allowed,
                      "shared memory of the router's product");
  dim3 const blocks(unsigned(tiles_of(x, Product::kExperts)), unsigned(to.count));
  cuda_check(launch_kernel(router_product_of_few_kernel<Product>,
                           {.blocks = blocks,
                            .threads = Product::kThreads,
                            .bytes = Product::bytes(p.chunk, p.rows),
                            .stream = queue.stream,
                            .early = true},
                           p),
             "launch of the router's product");
}

template <class T, bool biased>
void launch_few(RouterLogits const& x, LogitParts const& to, int64_t stride, Queue const& queue) {
  if (experts_of_block(x, queue) == 16) {
    launch_few<RouterProductOfFew<T, 16, biased>>(x, to, stride, queue);
  } else {
    launch_few<RouterProductOfFew<T, 32, biased>>(x, to, stride, queue);
  }
}

template <class T>
void launch_tile(RouterTile const& tile, RouterLogits const& x, LogitParts const& to,
                 int64_t stride, Queue const& queue) {
  if (few_for_router(x.tokens, x.hidden, x.experts)) {
    return x.bias == nullptr ? launch_few<T, false>(x, to, stride, queue)
                             : launch_few<T, true>(x, to, stride, queue);
  }
  auto const is = [&](int tokens, int experts) {
    return tile.tokens == tokens && tile.experts == experts;
  };
  if (is(64, 16)) return launch_product<T, 64, 16>(x, to, stride, queue);
  if (is(64, 32)) return launch_product<T, 64, 32>(x, to, stride, queue);
  if (is(64, 64)) return launch_product<T, 64, 64>(x, to, stride, queue);
  if (is(64, 128)) return launch_product<T, 64, 128>(x, to, stride, queue);
  if (is(128, 32)) return launch_product<T, 128, 32>(x, to, stride, queue);
  if (is(128, 64)) return launch_product<T, 128, 64>(x, to, stride, queue);
  launch_product<T, 128, 128>(x, to, stride, queue);
}

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) add_parts_kernel(LogitParts parts, float* logits,
                                                             int64_t stride, int experts,
                                                             bool sigmoid) {
  wait_for_previous();
  let_next_start();
  int64_t const i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= parts.stride) return;
  float const logit = parts.sum(i);
  logits[i / experts * stride + i % experts] = sigmoid ? sigmoid_of(logit) : logit;
}

}  // namespace

LogitParts multiply_for_router(RouterLogits const& x, Queue const& queue) {
  check_on_gpu(x);
  RouterTile const tile = choose_router_tile(x.tokens, x.hidden, x.experts);
  int const count = tile.split ? int(router_chunks(x.hidden)) : 1;
  bool const direct = count == 1 && x.logits.data != nullptr && !x.sigmoid;
  LogitParts const to{static_cast<float*>(direct ? x.logits.data : x.workspace),
                      x.tokens * x.experts, count};
  if (x.tokens == 0) return to;
  int64_t const stride = direct ? row_stride(x.logits, x.experts) : x.experts;
  with_type(x.dtype,
            [&](auto element) { launch_tile<decltype(element)>(tile, x, to, stride, queue); });
  return to;
}

int64_t blocks_of_few(RouterLogits const& x, Queue const& queue) {
  return tiles_of(x, experts_of_block(x, queue)) * router_chunks(x.hidden);
}

void router_logits(RouterLogits const& x, Queue queue) {
  require(x.logits.data != nullptr || x.tokens == 0, "logits: expected a pointer, got null");
  require(x.gate.data == nullptr, "gate: expected null because there is no router");
  LogitParts const parts = multiply_for_router(x, queue);
  if (x.tokens == 0 || (parts.count == 1 && !x.sigmoid)) return;
  unsigned const blocks = unsigned(ceil_div(parts.stride, kThreads));
  cuda_check(
      launch_kernel(add_parts_kernel,
                    {.blocks = blocks, .threads = kThreads, .stream = queue.stream, .early = true},
                    parts, static_cast<float*>(x.logits.data), row_stride(x.logits, x.experts),
                    int(x.experts), x.sigmoid),
      "launch of the router's product");
}

}  // namespace guild::cuda
