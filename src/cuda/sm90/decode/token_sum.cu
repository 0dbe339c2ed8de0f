// Host side of the down projection fused with the sum over experts: when it applies, and its
// launch.
#include <bit>

#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/decode/launch.cuh"
#include "cuda/sm90/decode/token_sum.cuh"
#include "cuda/sm90/forced_config.h"

namespace guild::cuda::sm90 {
namespace {

bool comes_by_group(TokenSum const& x) { return x.k % 64 == 0 && x.n % 8 == 0; }

// Weights (E, n, k) in stages of `width` rows, or in boxes of eight where these do not lie evenly.
template <class Kernel, class T, DecodeShape shape>
typename Kernel::Source sum_source(ConstWeight const& w, int64_t experts, TokenSum const& x,
                                   int width, char const* name) {
  if constexpr (Kernel::kTransposed) {
    return {.map = block_map<T, Major::MN>(w, experts, x.n, x.k, 64, name)};
  }
  if (!comes_by_group(x)) {
    return {.map = block_map<T, Major::K>(w, experts, x.n, x.k, 8, name), .by_group = false};
  }
  return {.map = group_map(w.data, dtype_of<T>(),
                           {.rows = x.n,
                            .steps = x.k / 64,
                            .experts = experts,
                            .row_stride = w.out_stride,
                            .expert_stride = w.expert_stride,
                            .box_rows = width,
                            .box_steps = shape.steps()},
                           name),
          .by_group = true};
}

constexpr DecodeShape kWide{8, 128, /*staged=*/256};

// Blocks that share a tile of transposed weights, with two experts each at most. Larger clusters,
// for more than four slots, may not fill all multiprocessors.
constexpr int kBlocksOfTile = 2;

template <class T, DecodeShape shape, int at_once, bool plain, Major major = Major::K>
void launch_token_sum(TokenSum const& x, Queue const& queue) {
  using Kernel = TokenSumKernel<T, shape, plain, at_once, major>;
  int64_t const terms = x.sort.tokens * x.sort.top_k + x.shared;
  typename Kernel::Params p{};
  int const width = width_of(shape, at_once, major, terms);
  p.width_log2 = std::countr_zero(unsigned(width));
  p.sort = x.sort;
  p.score = x.score;
  p.weight = sum_source<Kernel, T, shape>(x.w, x.sort.experts, x, width, "w_down");
  p.a_map = row_map<T>(x.a, terms, x.k, 1, 8, "a");
  p.across = int(ceil_div(x.n, width));
  p.columns = int(x.n);
  p.k = int(x.k);
  p.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, x.n)};
  p.residual = static_cast<T const*>(x.residual.data);
  p.residual_stride = row_stride(x.residual, x.n);
  p.o = static_cast<T*>(x.o.data);
  p.o_stride = row_stride(x.o, x.n);
  p.residual_scale = x.residual_scale;
  p.shared = x.shared;
  if (x.shared) {
    p.shared_weight = sum_source<Kernel, T, shape>(x.shared_w, 1, x, width, "shared.w_down");
  }
  p.cluster = major == Major::K ? 1 : kBlocksOfTile;
  static AllowedOn allowed;
  launch_few(decode_kernel<Kernel>, allowed, Kernel::kBytes, Kernel::kBytes, p,
             p.across * p.cluster, at_once, queue, p.cluster);
}

// Whether most SMs get one block and none a second. A block then has the SM's shared memory to
// itself, for a ring that holds twice as much before A is ready.
bool have_one_each(int64_t blocks, Queue const& queue) {
  int64_t const most = multiprocessors(queue);
  return blocks <= most && 3 * blocks >= 2 * most;
}
// The same for tiles of this shape. For more slots than four it does not pay (docs/measured/).
bool have_one_each(DecodeShape shape, int64_t terms, int64_t columns, Queue const& queue) {
  int const width = width_of(shape, /*at_once=*/1, Major::K, terms);
  return terms <= 4 && have_one_each(ceil_div(columns, width), queue);
}

// Calls f.template operator()<shape, blocks that share a multiprocessor>() with a shape that holds
// eight rows or more of each weight of a single token, or takes those of several tokens in passes.
template <class F>
void with_terms(int64_t terms, int64_t columns, Queue const& queue, F&& f) {
  constexpr DecodeShape narrow{8, 64}, wide = kWide;
  if (have_one_each(narrow, terms, columns, queue)) {
    f.template operator()<narrow, 1>();
  } else if (have_one_each(wide, terms, columns, queue)) {
    f.template operator()<wide, 1>();
  } else if (terms <= 2) {
    f.template operator()<DecodeShape{8, 32}, kAtOnce>();
  } else if (terms <= 8) {
    f.template operator()<DecodeShape{8, 64}, kAtOnce>();
  } else if (terms <= 16) {
    f.template operator()<DecodeShape{16, 64}, kAtOnce>();
  } else {
    f.template operator()<DecodeShape{32, 64}, kAtOnce>();
  }
}

// Whether tiles of eight columns keep (nearly) all blocks busy until the end. If not, the fused sum
// of several tokens is slower (docs/measured/).
bool fill_evenly(int64_t columns, Queue const& queue) {
  if (forced_decode == 1) return true;
  int64_t const tiles = ceil_div(columns, 8), blocks = kAtOnce * multiprocessors(queue);
  return 10 * tiles >= 9 * blocks * ceil_div(tiles, blocks);
}

}  // namespace

bool token_sum(TokenSum const& x, Queue const& queue) {
  int64_t const tokens = x.sort.tokens, terms = tokens * x.sort.top_k + x.shared;
  bool const several =
      tokens <= 4 && terms <= kMostSummedSlots && !x.shared && fill_evenly(x.n, queue);
  bool const fits = tokens == 1 ? terms <= 16 : several;
  if (!fits || x.w.expert_at != nullptr) return false;
  if (x.w.in_stride != 1) {
    int64_t const blocks = kBlocksOfTile * ceil_div(x.n, 64);
    bool const able = tokens == 1 && !x.shared && terms >= 2 && terms <= 2 * kBlocksOfTile;
    if (!able || !have_one_each(blocks, queue)) return false;
    with_type(x.dtype, [&](auto element) {
      launch_token_sum<decltype(element), kWide, 1, false, Major::MN>(x, queue);
    });
    return true;
  }
  bool const plain = comes_by_group(x) && x.bias.data == nullptr;
  with_type(x.dtype, [&](auto element) {
    with_terms(terms, x.n, queue, [&]<DecodeShape shape, int at_once> {
      if (plain) return launch_token_sum<decltype(element), shape, at_once, true>(x, queue);
      launch_token_sum<decltype(element), shape, at_once, false>(x, queue);
    });
  });
  return true;
}

}  // namespace guild::cuda::sm90
