// The up projection of few tokens.
#include "cuda/sm90/decode/decode.h"
#include "cuda/sm90/decode/launch.cuh"

namespace guild::cuda::sm90 {
namespace {

constexpr auto kAny = StaticActivation::any, kSwiglu = StaticActivation::swiglu,
               kGptOss = StaticActivation::gpt_oss;

// Rows of the weight in a tile: the fewest where there are few tokens.
constexpr int up_rows(int tokens, Major major) {
  return major != Major::K ? 128 : tokens == 8 ? 32 : 64;
}

// Whether a kernel's blocks ever have a multiprocessor alone.
template <DecodeShape shape, Major major, StaticActivation known>
constexpr bool kCanBeAlone =
    major == Major::MN ? known == kGptOss : shape.rows == 32 || shape.rows == 64;

// The most experts of a choice that takes a block little time.
constexpr int64_t kShortChoice = 256;

// How many tiles of so many rows of the weights there are if each expert's tokens fit in one.
int64_t tiles_of(UpProduct const& x, int rows) {
  int const outputs = x.pairing == Pairing::none ? 1 : 2;  // for each activation
  int64_t const experts = std::min<int64_t>(x.rows, x.groups.groups);
  return experts * ceil_div(outputs * x.n, rows) + ceil_div(outputs * x.shared.n, rows);
}

// Resident blocks per SM. Two hide the ends of each other's tiles; one has a ring twice as long and
// reads weights a little faster. On an H200 (docs/measured/), one is faster
//
//   - with tiles of 64 rows, where experts have few rows of X each;
//   - with tiles of 32 rows, where these are long;
//   - where rows are of medium length and tiles are few: two per SM would crowd on some SMs.
//     Likewise where there are slightly more tiles than two blocks per SM take at once: a few
//     blocks would end late, with a second tile;
//   - for gpt-oss's own layout.
//
// Blocks that choose a token's experts all begin at the same time and crowd less; the longer the
// choice takes, the more the second block of an SM gains from the first one's rehearsal.
template <DecodeShape shape, Major major, StaticActivation known>
int blocks_at_once(UpProduct const& x, Queue const& queue) {
  constexpr int64_t kLongRow = 3072, kMediumRow = 2048, kFewRowsEach = 3;
  if (queue.sms > 0 || !kCanBeAlone<shape, major, known>) return kAtOnce;
  if (major == Major::MN) return 1;
  double const tiles_each = double(tiles_of(x, shape.rows)) / double(multiprocessors(queue));
  bool const is_medium = x.k >= kMediumRow;
  if (shape.rows == 64) {
    bool const few_rows = x.rows <= kFewRowsEach * x.groups.groups;
    return few_rows || (is_medium && tiles_each <= 1) ? 1 : kAtOnce;
  }
  bool const choosing = x.choice != nullptr;
  double const few = choosing ? 0.75 : 1.75;
  double const slightly_more = !choosing ? 2.5 : x.groups.groups <= kShortChoice ? 2.75 : kAtOnce;
  bool const unhidden = tiles_each <= few || (tiles_each > kAtOnce && tiles_each <= slightly_more);
  return x.k > kLongRow || (is_medium && unhidden) ? 1 : kAtOnce;
}

// How many blocks of a launch, the first ones, rehearse their choice: those that become resident
// while the router's product still runs. With two blocks per SM, an SM that runs a block of the
// product has room for one of them, which rehearses for both; with one per SM, it has no room. Half
// of the blocks kept out in this way still have time to rehearse a short choice before the
// product's last block ends (docs/measured/).
int rehearsing_blocks(TokenChoice const& choice, int at_once, Queue const& queue) {
  bool const is_short = choice.route.experts <= kShortChoice;
  int64_t const late = at_once == 1 && is_short ? choice.blocks / 2 : choice.blocks;
  return int(std::max<int64_t>(0, at_once * multiprocessors(queue) - late));
}

// at_once: as of DecodeProduct.
template <class T, Major major, bool gathered, DecodeShape shape, PlanFrom from,
          StaticActivation known, int at_once>
void launch_with_ring(UpProduct const& x, int blocks, Queue const& queue) {
  using Product = DecodeProduct<T, shape, major, gathered, true, from, known, at_once>;
  bool const halves = x.pairing == Pairing::halves;
  int64_t const columns = x.pairing == Pairing::alternate ? 2 * x.n : x.n;
  typename Product::Params p{};
  p.plan.groups = x.groups;
  if (x.sort != nullptr) p.plan.sort = *x.sort, p.plan.writes = true;
  if constexpr (chooses(from)) {
    p.choice = *x.choice;
    p.rehearsing = rehearsing_blocks(p.choice, blocks, queue);
  }
  p.weight = weight_source<Product, T, major>(x.w[0], x.w[1], x.groups.groups, columns, x.k, halves,
                                              "w_up");
  for (int i = 0; i < 2; ++i) p.expert_at[i] = x.w[i].expert_at;
  p.halves = halves;
  int const across = shape.rows / (halves ? 2 : 1);  // of a tile
  p.across = int(ceil_div(columns, across));
  p.rows = int(x.rows);
  p.k = int(x.k);
  p.early = x.after_pull;
  if constexpr (gathered) {
    p.x = static_cast<T const*>(x.a.data);
    p.stride = addressable_stride(x.tokens, row_stride(x.a, x.k), "x");
    p.row_token = x.row_token;
    p.tokens = int(x.tokens);
  } else {
    p.x_map = row_map<T>(x.a, x.rows, x.k, 1, 8, "x");
  }
  p.claims = claims_of(x.activated.data, queue);
  auto& out = p.results.target[0];
  out.h = {static_cast<T*>(x.h.data), row_stride(x.h, columns * (halves ? 2 : 1))};
  out.a = {static_cast<T*>(x.activated.data), row_stride(x.activated, x.n)};
  out.bias = {static_cast<T const*>(x.bias.data), row_stride(x.bias, columns * (halves ? 2 : 1))};
  out.columns = int(columns);
  p.results.pairing = {x.pairing};
  p.results.activation = activation_in<float>(x.activation);
  if (x.shared.n > 0) {
    int64_t const width = x.pairing == Pairing::alternate ? 2 * x.shared.n : x.shared.n;
    auto& shared = p.shared;
    shared.weight = weight_source<Product, T, major>(x.shared.w[0], x.shared.w[1], 1, width, x.k,
                                                     halves, "shared.w_up");
    shared.rows = int(x.tokens);
    shared.across = int(ceil_div(width, across));
    shared.k = p.k;
    p.results.target[1].a = {static_cast<T*>(x.shared.activated.data),
                             row_stride(x.shared.activated, x.shared.n)};
    p.results.target[1].columns = int(width);
  }
  launch_decode<Product>(p, most_decode_tiles(p, x.groups.groups, shape.tokens), blocks, queue);
}

// Kernels that choose a token's experts are compiled for each ring length, which saves up to 0.8 us
// (docs/measured/).
template <class T, Major major, bool gathered, DecodeShape shape, PlanFrom from,
          StaticActivation known>
void launch_up(UpProduct const& x, Queue const& queue) {
  int const blocks = blocks_at_once<shape, major, known>(x, queue);
  auto const launch = [&]<int at_once> {
    launch_with_ring<T, major, gathered, shape, from, known, at_once>(x, blocks, queue);
  };
  if constexpr (!chooses(from)) {
    launch.template operator()<0>();
  } else {
    if constexpr (kCanBeAlone<shape, major, known>) {
      if (blocks == 1) return launch.template operator()<1>();
    }
    launch.template operator()<kAtOnce>();
  }
}

// Whether the DecodeProduct of SwiGLU serves: what most models need in inference.
bool is_plain(UpProduct const& x) {
  return is_swiglu(x) && x.bias.data == nullptr && x.h.data == nullptr &&
         comes_by_stage(x.w[0], x.w[1], x.k) &&
         (x.shared.n == 0 || comes_by_stage(x.shared.w[0], x.shared.w[1], x.k));
}

// K-major weights and gathered rows.
template <class T, DecodeShape shape, PlanFrom from>
void launch_gathered(UpProduct const& x, Queue const& queue) {
  if (is_plain(x)) return launch_up<T, Major::K, true, shape, from, kSwiglu>(x, queue);
  launch_up<T, Major::K, true, shape, from, kAny>(x, queue);
}

// Whether the DecodeProduct of gpt-oss's activation serves, for transposed weights. Its tiles have
// 64 rows, gate and up in one box: more tiles than of 128 rows.
bool is_gpt_oss(UpProduct const& x) {
  return static_activation_of(x.activation, x.pairing) == kGptOss && x.h.data == nullptr;
}
template <class T, PlanFrom from>
void launch_gpt_oss(UpProduct const& x, Queue const& queue) {
  launch_up<T, Major::MN, true, DecodeShape{8, 64}, from, kGptOss>(x, queue);
}

template <class T, Major major>
void launch_with_choice(UpProduct const& x, Queue const& queue) {
  constexpr DecodeShape few{8, up_rows(8, major)};
  with_ranking(x.choice->route, [&]<Ranking ranking> {
    constexpr auto from = ranking == Ranking::softmax ? PlanFrom::softmax_choice : PlanFrom::choice;
    if constexpr (major != Major::K) {
      if constexpr (from == PlanFrom::softmax_choice) {
        if (is_gpt_oss(x)) return launch_gpt_oss<T, from>(x, queue);
      }
      launch_up<T, major, true, few, from, kAny>(x, queue);
    } else {
      launch_gathered<T, few, from>(x, queue);
    }
  });
}

template <class T, Major major, bool gathered, DecodeShape shape>
void launch_with_plan(UpProduct const& x, Queue const& queue) {
  if constexpr (gathered && major == Major::K) {
    PlanFrom const from = plan_from(x.sort);
    if constexpr (shape.tokens == 8) {
      constexpr auto few = PlanFrom::few_slots;
      if (from == few) return launch_gathered<T, shape, few>(x, queue);
    }
    if (is_plain(x)) {
      constexpr auto offsets = PlanFrom::offsets, slots = PlanFrom::slots;
      if (from == offsets) return launch_up<T, major, true, shape, offsets, kSwiglu>(x, queue);
      return launch_up<T, major, true, shape, slots, kSwiglu>(x, queue);
    }
  }
  if constexpr (gathered && major == Major::MN && shape.tokens == 8) {
    constexpr auto few = PlanFrom::few_slots;
    if (plan_from(x.sort) == few && is_gpt_oss(x)) return launch_gpt_oss<T, few>(x, queue);
  }
  constexpr auto from = gathered ? PlanFrom::any : PlanFrom::offsets;
  launch_up<T, major, gathered, shape, from, kAny>(x, queue);
}

}  // namespace

bool is_swiglu(UpProduct const& x) {
  return static_activation_of(x.activation, x.pairing) == StaticActivation::swiglu;
}

void decode_up_product(UpProduct const& x, Queue const& queue) {
  with_product(
      x.dtype, x.w[0].in_stride == 1, x.row_token != nullptr,
      [&]<class T, Major major, bool gathered> {
        if constexpr (gathered) {  // a single token is
          if (x.choice != nullptr) return launch_with_choice<T, major>(x, queue);
        }
        with_tokens(x.tokens, x.rows, x.groups.groups, [&]<int tokens> {
          launch_with_plan<T, major, gathered, DecodeShape{tokens, up_rows(tokens, major)}>(x,
                                                                                            queue);
        });
      });
}

}  // namespace guild::cuda::sm90
