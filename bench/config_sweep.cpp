// Times every GEMM config of every product at random shapes, to judge and to fit the cost model in
// src/shared/gemm_config.h.
//
//   guild_config_sweep [SHAPES = 40] [SEED = 1] [MILLISECONDS = 25] [ROUNDS = 3] [ROUTING = random]
//
// ROUTING is random (each token chooses K different experts), zipf (with chances 1, 1/2, 1/3, ...)
// or balanced. Half of the shapes have 300 to 700 rows an expert, where last tiles weigh most; the
// others are drawn as `guild bench --sweep` does. With SHAPES = 0 they are read from standard
// input, five numbers each: T H I E K.
//
// Inputs and weights are normals, made anew for each shape, the weights such that results are about
// as large as inputs: zeros, infinities and NaNs take less power, and with it less time. Configs
// take turns, a slice of some milliseconds each, so the GPU never rests. One line of JSON a
// product: its sizes, the milliseconds of each config (0: does not serve it), the chosen one, and
// the chosen one's time over the best. Where that is above 1.07, `again` has the same ratio in two
// longer rounds of these two.
#include <cuda_runtime_api.h>
#include <guild/guild.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/sm90/forced_config.h"
#include "shared/gemm_config.h"

namespace guild {
namespace {

constexpr int64_t kMostBytes = int64_t(40) << 30;
constexpr int64_t kMostRows = 400'000;
constexpr int64_t kArenaBytes = int64_t(60) << 30;  // shapes that are named may be larger

void require_cuda(cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

// Device memory that is handed out once and freed as a whole.
class Arena {
 public:
  explicit Arena(int64_t bytes) : all_(bytes) {
    require_cuda(cudaMalloc(reinterpret_cast<void**>(&first_), size_t(bytes)),
                 "memory of the sweep");
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> values(kBlock);
    for (float& x : values) x = normal(random);
    for (char*& block : normals_) {
      block = upload(values);
      for (float& x : values) x /= 2;
    }
    reset();
  }
  void reset() { next_ = first_, left_ = all_; }
  // Elements of two bytes, which may hold anything.
  char* take(int64_t elements) {
    int64_t const bytes = (elements * 2 + 1023) / 1024 * 1024;
    if (bytes > left_) throw std::runtime_error("a shape larger than the arena");
    char* const found = next_;
    next_ += bytes, left_ -= bytes;
    return found;
  }
  // Normals in bfloat16, so small that sums of `terms` products with standard normals are about as
  // large as those.
  char* normals(int64_t elements, int64_t terms = 1) {
    char* const to = take(elements);
    int const halvings = int(std::log2(double(terms)) / 2 + .5);
    for (int64_t at = 0; at < elements; at += kBlock) {
      size_t const bytes = size_t(std::min(kBlock, elements - at)) * 2;
      require_cuda(cudaMemcpy(to + at * 2, normals_[std::min(halvings, kHalvings - 1)], bytes,
                              cudaMemcpyDeviceToDevice),
                   "normals");
    }
    return to;
  }
  int32_t* copy(std::vector<int32_t> const& values) {
    char* const to = take(int64_t(values.size()) * 2);
    require_cuda(cudaMemcpy(to, values.data(), values.size() * 4, cudaMemcpyHostToDevice), "ids");
    return reinterpret_cast<int32_t*>(to);
  }

 private:
  static constexpr int64_t kBlock = 1 << 24;
  static constexpr int kHalvings = 8;

  static char* upload(std::vector<float> const& values) {
    std::vector<uint16_t> rounded;
    for (float const value : values) {
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      rounded.push_back(uint16_t(bits >> 16));
    }
    char* to = nullptr;
    require_cuda(cudaMalloc(reinterpret_cast<void**>(&to), rounded.size() * 2), "normals");
    require_cuda(cudaMemcpy(to, rounded.data(), rounded.size() * 2, cudaMemcpyHostToDevice),
                 "normals");
    return to;
  }

  char* normals_[kHalvings];  // kBlock of them, with a standard deviation of 1, 1/2, 1/4, ...
  char *next_ = nullptr, *first_ = nullptr;
  int64_t left_ = 0, all_;
};

int64_t needed_bytes(Sizes const& s) {
  int64_t const weights = 6 * s.experts * s.hidden * s.intermediate;
  return 2 * (weights + s.rows() * (2 * s.hidden + 7 * s.intermediate) + 3 * s.tokens * s.hidden);
}

Sizes draw_sizes(std::mt19937& random, bool few_rows) {
  auto const between = [&](double least, double most, int64_t step) {
    double const x =
        std::exp(std::uniform_real_distribution<>(std::log(least), std::log(most))(random));
    return std::max(step, int64_t(x / double(step) + .5) * step);
  };
  for (;;) {
    Sizes s;
    s.hidden = between(768, 7168, 64);
    s.intermediate = between(256, 4096, 64);
    s.experts = between(8, 384, 1);
    s.top_k = 1 + int64_t(random() % 10);
    s.tokens = few_rows ? between(300, 700, 1) * s.experts / s.top_k : between(2048, 65536, 1);
    if (s.top_k <= s.experts && s.rows() <= kMostRows && needed_bytes(s) <= kMostBytes) return s;
  }
}

std::vector<Sizes> shapes_to_time(int drawn, std::mt19937& random) {
  std::vector<Sizes> shapes;
  for (int n = 0; n < drawn; ++n) shapes.push_back(draw_sizes(random, n % 2 == 0));
  Sizes s;
  while (drawn == 0 && std::cin >> s.tokens >> s.hidden >> s.intermediate >> s.experts >> s.top_k) {
    if (s.top_k < 1 || s.top_k > s.experts || s.tokens < 1) {
      throw std::runtime_error("a shape has no tokens, or K is not among 1 to E");
    }
    shapes.push_back(s);
  }
  if (drawn == 0 && !std::cin.eof()) throw std::runtime_error("shapes are five numbers each");
  return shapes;
}

// Puts each token's K experts, all different, at the front of `order`, which has all experts.
using Choice = std::function<void(int64_t token, std::vector<int32_t>& order)>;

Choice choice_of(std::string const& routing, Sizes const& s, std::mt19937& random) {
  if (routing == "balanced") {
    return [=](int64_t token, std::vector<int32_t>& order) {
      for (int64_t k = 0; k < s.top_k; ++k) {
        order[size_t(k)] = int32_t((token * s.top_k + k) % s.experts);
      }
    };
  }
  if (routing == "random") {
    return [=, &random](int64_t, std::vector<int32_t>& order) {
      for (int64_t k = 0; k < s.top_k; ++k) {
        std::swap(order[size_t(k)], order[size_t(k + int64_t(random() % uint64_t(s.experts - k)))]);
      }
    };
  }
  if (routing != "zipf") throw std::runtime_error("no routing is called " + routing);
  // The K earliest of exponential times are a draw without replacement.
  std::vector<double> slowness(size_t(s.experts));
  std::iota(slowness.begin(), slowness.end(), 1.);
  std::shuffle(slowness.begin(), slowness.end(), random);
  return [=, &random, times = slowness](int64_t, std::vector<int32_t>& order) mutable {
    std::exponential_distribution<> waiting;
    for (size_t e = 0; e < times.size(); ++e) times[e] = waiting(random) * slowness[e];
    std::nth_element(order.begin(), order.begin() + s.top_k - 1, order.end(),
                     [&](int32_t a, int32_t b) { return times[size_t(a)] < times[size_t(b)]; });
  };
}

Routing make_routing(std::string const& name, Sizes const& s, std::mt19937& random, Arena& arena) {
  std::vector<std::vector<int32_t>> tokens(size_t(s.experts));
  std::vector<int32_t> order(size_t(s.experts)), offsets{0}, row_token;
  std::iota(order.begin(), order.end(), 0);
  Choice const choose = choice_of(name, s, random);
  for (int64_t t = 0; t < s.tokens; ++t) {
    choose(t, order);
    for (int64_t k = 0; k < s.top_k; ++k) tokens[size_t(order[size_t(k)])].push_back(int32_t(t));
  }
  for (auto const& mine : tokens) {
    row_token.insert(row_token.end(), mine.begin(), mine.end());
    offsets.push_back(int32_t(row_token.size()));
  }
  Routing routing;
  routing.offsets = arena.copy(offsets);
  routing.row_token = arena.copy(row_token);
  return routing;
}

struct Step {
  char const* name;
  Product product;
  TileCount count;
  std::function<void()> run;
};

std::vector<Step> steps_of(Sizes const& s, Routing const& routing, Arena& arena) {
  int64_t const r = s.rows(), h = s.hidden, i = s.intermediate, e = s.experts;
  auto const rows = [&](int64_t count, int64_t width) { return Rows{arena.take(count * width)}; };
  Rows const x{arena.normals(s.tokens * h)}, dout{arena.normals(s.tokens * h)};
  Rows const pre = rows(r, 2 * i), a = rows(r, i);
  Rows const y = rows(r, h), dpre = rows(r, 2 * i), scaled = rows(r, i);
  Weight const down{arena.normals(e * h * i, i), h * i, i, 1};
  Weight const ddown{arena.take(e * h * i), h * i, i, 1};
  char *const w = arena.normals(2 * e * h * i, h), *const dw = arena.take(2 * e * h * i);
  auto const up = up_weight<ConstWeight>(w, s, true, GateUp::concatenated, false, 2);
  auto const dup = up_weight<Weight>(dw, s, true, GateUp::concatenated, false, 2);
  cuda::Queue queue;
  queue.counter = reinterpret_cast<int32_t*>(arena.take(2));
  WeightSchedule const schedule{arena.copy(std::vector<int32_t>(size_t(e))),
                                arena.copy(std::vector<int32_t>(WeightSchedule::kCounters))};
  auto const common = [&](auto step) {
    step.sizes = s, step.dtype = DType::bfloat16, step.routing = routing;
    return step;
  };
  auto forward = common(UpProjection());
  forward.x = x, forward.w_up = up, forward.h = pre, forward.a = a;
  auto second = common(DownProjection());
  second.a = a, second.w_down = down, second.y = y;
  auto third = common(DownGradient());
  third.dout = dout, third.w_down = down, third.h = pre, third.dh = dpre, third.a_scaled = scaled;
  auto fourth = common(UpGradient());
  fourth.dh = dpre, fourth.w_up = up, fourth.dx = y;
  auto fifth = common(DownWeightGradient());
  fifth.dout = dout, fifth.a = scaled, fifth.dw = ddown, fifth.schedule = schedule;
  auto sixth = common(UpWeightGradient());
  sixth.x = x, sixth.dh = dpre, sixth.dw = dup, sixth.schedule = schedule;
  auto const scheduled = [=] { cuda::schedule_weight_gradients(s, routing, schedule, queue); };
  TileCount const whole{.rows = h, .groups = e, .columns = i, .inner = r / e, .ragged = false};
  TileCount wide = whole;
  wide.columns = 2 * i;
  return {
      {"up", Product::up, {r, e, 2 * i, h}, [=] { cuda::up_projection(forward, queue); }},
      {"down", Product::rows, {r, e, h, i}, [=] { cuda::down_projection(second, queue); }},
      {"down gradient",
       Product::down_gradient,
       {r, e, i, h},
       [=] { cuda::down_gradient(third, queue); }},
      {"dX", Product::rows, {r, e, h, 2 * i}, [=] { cuda::up_gradient(fourth, queue); }},
      {"dW2", Product::experts, whole,
       [=] { scheduled(), cuda::down_weight_gradient(fifth, queue); }},
      {"dW1", Product::experts, wide, [=] { scheduled(), cuda::up_weight_gradient(sixth, queue); }},
  };
}

// Milliseconds of a run, over about `slice` of them.
double timed(Step const& step, int config, int count) {
  static cudaEvent_t const begin = [] {
    cudaEvent_t x;
    cudaEventCreate(&x);
    return x;
  }();
  static cudaEvent_t const end = [] {
    cudaEvent_t x;
    cudaEventCreate(&x);
    return x;
  }();
  cuda::forced_config = config;
  cudaEventRecord(begin);
  for (int i = 0; i < count; ++i) step.run();
  cudaEventRecord(end);
  cuda::forced_config = -1;
  require_cuda(cudaEventSynchronize(end), step.name);
  float taken = 0;
  cudaEventElapsedTime(&taken, begin, end);
  return double(taken) / count;
}

// Milliseconds of each config, one after the other; 0: does not serve the product.
using Times = std::array<double, std::size(kConfigs)>;

Times timed_in_turns(Step const& step, int count, int rounds) {
  Times median{};
  std::array<std::vector<double>, std::size(kConfigs)> times;
  for (int round = 0; round < rounds; ++round) {
    for (size_t n = 0; n < times.size(); ++n) {
      size_t const config = round % 2 == 0 ? n : times.size() - 1 - n;
      if (kConfigs[config].serves(step.product)) {
        times[config].push_back(timed(step, int(config), count));
      }
    }
  }
  for (size_t i = 0; i < times.size(); ++i) {
    if (times[i].empty()) continue;
    std::nth_element(times[i].begin(), times[i].begin() + rounds / 2, times[i].end());
    median[i] = times[i][size_t(rounds / 2)];
  }
  return median;
}

// Prints the line of a product; the chosen config's time over the best one's.
double measure(Step const& step, Sizes const& s, double slice, int rounds) {
  constexpr double kSuspicious = 1.07, kLonger = 100;  // milliseconds
  int const chosen = choose_config(step.product, step.count);
  timed(step, chosen, 1);
  double const once = timed(step, chosen, 1);
  Times const times = timed_in_turns(step, std::max(1, int(slice / once)), rounds);
  int best = chosen;
  for (int i = 0; i < int(times.size()); ++i) {
    if (times[size_t(i)] > 0 && times[size_t(i)] < times[size_t(best)]) best = i;
  }
  double const over = times[size_t(chosen)] / times[size_t(best)];
  std::printf("{\"shape\": [%lld, %lld, %lld, %lld, %lld], \"product\": \"%s\", \"ms\": [",
              (long long)s.tokens, (long long)s.hidden, (long long)s.intermediate,
              (long long)s.experts, (long long)s.top_k, step.name);
  for (size_t i = 0; i < times.size(); ++i) std::printf("%s%.5f", i > 0 ? ", " : "", times[i]);
  std::printf("], \"chosen\": %d, \"over_best\": %.4f", chosen, over);
  if (over > kSuspicious) {
    int const count = std::max(1, int(kLonger / once));
    double const first = timed(step, chosen, count) / timed(step, best, count);
    double const second = 1 / (timed(step, best, count) / timed(step, chosen, count));
    std::printf(", \"again\": [%.4f, %.4f]", first, second);
  }
  std::printf("}\n");
  return over;
}

int sweep(int shapes, unsigned seed, double slice, int rounds, std::string const& routing_name) {
  cuda::forced_decode = 0;  // kernels for few tokens have no configs
  std::mt19937 random(seed);
  Arena arena(kArenaBytes);
  double worst = 0;
  std::vector<Sizes> const all = shapes_to_time(shapes, random);
  for (Sizes const& s : all) {
    arena.reset();
    Routing const routing = make_routing(routing_name, s, random, arena);
    for (Step const& step : steps_of(s, routing, arena)) {
      worst = std::max(worst, measure(step, s, slice, rounds));
    }
    std::fflush(stdout);
  }
  std::fprintf(stderr, "%d shapes: the chosen config takes at most %.3f of the best one's time\n",
               int(all.size()), worst);
  return 0;
}

}  // namespace
}  // namespace guild

int main(int argc, char** argv) try {
  auto const argument = [&](int i, double otherwise) {
    return argc > i ? std::strtod(argv[i], nullptr) : otherwise;
  };
  return guild::sweep(int(argument(1, 40)), unsigned(argument(2, 1)), argument(3, 25),
                      int(argument(4, 3)), argc > 5 ? argv[5] : "random");
} catch (std::exception const& error) {
  std::fprintf(stderr, "guild_config_sweep: %s\n", error.what());
  return 1;
}
