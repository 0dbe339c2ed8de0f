// The bare grouped product in its four cases, with operands in either order, against naive loops.
#include <optional>
#include <random>

#include "cuda/sm90/forced_config.h"
#include "device_test.h"
#include "reference.h"
#include "shared/gemm_config.h"

namespace guild::test {

namespace {

using Ragged = GroupedGemm::Ragged;

struct Problem {
  Ragged ragged;
  std::vector<int64_t> counts;  // of the ragged dimension; its rest belongs to no group
  int64_t m, n, k;              // totals
  bool a_flipped = false, b_flipped = false, d_flipped = false;  // column-major
  bool bias = false, accumulate = false, float_out = false;
};

// Host values of one operand, (matrices, rows, cols), in memory row- or column-major.
struct Stack {
  int64_t matrices, rows, cols;
  bool flipped;
  std::vector<double> values;  // as they lie in memory

  int64_t index(int64_t e, int64_t i, int64_t j) const {
    return (e * rows + i) * cols + j + (flipped ? j * rows + i - i * cols - j : 0);
  }
  double at(int64_t e, int64_t i, int64_t j) const { return values[index(e, i, j)]; }
  GroupedGemm::Operand view(Tensor const& t) const {
    return {t.data(), rows * cols, flipped ? 1 : cols, flipped ? rows : 1};
  }
};

class GroupedProduct : public DeviceTest {
 protected:
  Stack random(int64_t matrices, int64_t rows, int64_t cols, bool flipped, DType dtype) {
    Stack s{matrices, rows, cols, flipped, std::vector<double>(matrices * rows * cols)};
    std::normal_distribution<double> normal;
    for (double& v : s.values) v = round_to(dtype, normal(random_));
    return s;
  }
  Tensor upload(Stack const& s, DType dtype) {
    Tensor t(device(), dtype, 1, int64_t(s.values.size()));
    t.set(s.values);
    return t;
  }
  void run(Problem const& p, DType dtype);

  std::mt19937_64 random_{7};
};

// What the product leaves in d, in the arithmetic of F.
template <class F>
std::vector<double> product(Problem const& p, Stack const& a, Stack const& b, Stack const& bias,
                            Stack const& start, DType out_dtype) {
  std::vector<double> d = p.accumulate ? start.values : std::vector<double>(start.values.size());
  auto const stacked = [](Stack const& s, int64_t e) { return s.matrices == 1 ? 0 : e; };
  int64_t begin = 0;
  for (int64_t e = 0; e < int64_t(p.counts.size()); ++e) {
    int64_t const end = begin + p.counts[e];
    auto const range = [&](bool split, int64_t size) {
      return split ? std::pair{begin, end} : std::pair{int64_t(0), size};
    };
    auto const [m0, m1] = range(p.ragged == Ragged::rows, p.m);
    auto const [n0, n1] = range(p.ragged == Ragged::columns, p.n);
    auto const [k0, k1] = range(p.ragged == Ragged::inner, p.k);
    for (int64_t i = m0; i < m1; ++i) {
      for (int64_t j = n0; j < n1; ++j) {
        F sum = 0;
        // One pointer and step each: sanitizers check every product of an index.
        double const* x = a.values.data() + a.index(stacked(a, e), i, 0);
        double const* y = b.values.data() + b.index(stacked(b, e), 0, j);
        int64_t const x_step = a.flipped ? a.rows : 1, y_step = b.flipped ? 1 : b.cols;
        for (int64_t k = k0; k < k1; ++k) sum += F(x[k * x_step]) * F(y[k * y_step]);
        if (k0 == k1) continue;  // an empty sum: nothing is added, not even the bias
        if (p.bias) sum += F(bias.at(0, e, p.ragged == Ragged::columns ? i : j));
        double& out = d[start.index(stacked(start, e), i, j)];
        if (p.accumulate) sum += F(out);
        out = std::is_same_v<F, double> ? double(sum) : round_to(out_dtype, sum);
      }
    }
    begin = end;
  }
  return d;
}

void GroupedProduct::run(Problem const& p, DType dtype) {
  int64_t const groups = int64_t(p.counts.size());
  bool const none = p.ragged == Ragged::none;
  DType const out_dtype = p.float_out ? DType::float32 : dtype;
  auto const a =
      random(none || p.ragged == Ragged::columns ? groups : 1, p.m, p.k, p.a_flipped, dtype);
  auto const b =
      random(none || p.ragged == Ragged::rows ? groups : 1, p.k, p.n, p.b_flipped, dtype);
  auto const start =
      random(none || p.ragged == Ragged::inner ? groups : 1, p.m, p.n, p.d_flipped, out_dtype);
  auto const bias = random(1, groups, p.ragged == Ragged::columns ? p.m : p.n, false, dtype);
  Tensor const a_memory = upload(a, dtype), b_memory = upload(b, dtype);
  Tensor const bias_memory = upload(bias, dtype);
  Tensor d(device(), out_dtype, 1, int64_t(start.values.size()));
  std::vector<int32_t> ends;
  for (int64_t count : p.counts) ends.push_back(int32_t(count + (ends.empty() ? 0 : ends.back())));
  Indices<int32_t> const offsets(device(), ends);

  GroupedGemm x;
  x.ragged = p.ragged, x.m = p.m, x.n = p.n, x.k = p.k, x.groups = groups;
  x.dtype = dtype, x.out_dtype = out_dtype, x.accumulate = p.accumulate;
  if (!none) x.offsets = offsets.data();
  x.a = a.view(a_memory), x.b = b.view(b_memory), x.d = start.view(d);
  if (p.bias) x.bias = {bias_memory.data(), 0};
  std::vector<std::byte> first;
  for (int repeat = 0; repeat < 2; ++repeat) {
    p.accumulate ? d.set(start.values) : d.poison();
    device().run(x);
    if (repeat == 0) first = d.raw();
  }
  EXPECT_TRUE(first == d.raw()) << "d differs in a second run";
  d.expect_untouched_from(1, "d");
  expect_close(d.get(), product<double>(p, a, b, bias, start, out_dtype),
               product<float>(p, a, b, bias, start, out_dtype), out_dtype, "d");
}

std::vector<Problem> problems(bool odd) {
  std::vector<Problem> all;
  for (Ragged ragged : {Ragged::rows, Ragged::inner, Ragged::columns, Ragged::none}) {
    for (int flips = 0; flips < 8; ++flips) {
      for (int options = 0; options < 8; ++options) {
        Problem p{ragged, {40, 0, 129, 7, 56}, 72, 136, 48};
        if (odd) p = {ragged, {4, 0, 13, 7}, 9, 11, 5};
        int64_t const total = odd ? 26 : 240;  // some past the last group
        (ragged == Ragged::rows    ? p.m
         : ragged == Ragged::inner ? p.k
                                   : p.n) = ragged == Ragged::none ? p.n : total;
        p.a_flipped = flips & 1, p.b_flipped = flips & 2, p.d_flipped = flips & 4;
        p.bias = options & 1, p.accumulate = options & 2, p.float_out = options & 4;
        all.push_back(p);
      }
    }
  }
  return all;
}

std::string describe(Problem const& p, DType dtype) {
  std::ostringstream text;
  text << "ragged " << int(p.ragged) << " flipped " << p.a_flipped << p.b_flipped << p.d_flipped
       << " bias " << p.bias << " accumulate " << p.accumulate << " float " << p.float_out << " "
       << name_of(dtype);
  return text.str();
}

TEST_P(GroupedProduct, EveryCase) {
  for (bool odd : {false, true}) {
    for (Problem const& p : problems(odd)) {
      for (DType dtype : dtypes()) {
        SCOPED_TRACE(describe(p, dtype));
        run(p, dtype);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(GroupedProduct, NothingToDo) {
  for (DType dtype : dtypes()) {
    run({Ragged::rows, {0, 0, 0}, 0, 16, 8}, dtype);
    run({Ragged::rows, {0, 0, 0}, 24, 16, 8}, dtype);  // every row belongs to no group: zeros
    run({Ragged::rows, {3, 5}, 8, 16, 0}, dtype);
    run({Ragged::inner, {0, 0}, 16, 24, 0}, dtype);
    run({Ragged::columns, {0, 0}, 16, 0, 8}, dtype);
    run({Ragged::none, {1, 1}, 0, 8, 8}, dtype);
  }
}

TEST_P(GroupedProduct, LargerThanATile) {
  for (DType dtype : dtypes()) {
    run({Ragged::rows, {300, 1, 259}, 560, 264, 104}, dtype);
    run({Ragged::rows, {30, 1, 40}, 80, 136, 1032}, dtype);
    run({Ragged::inner, {600, 1, 59}, 136, 272, 664}, dtype);
    run({Ragged::columns, {300, 1, 259}, 264, 560, 104}, dtype);
  }
}

// Whole and partial tiles of pairs of blocks, 256 rows each, by the kernels of each config.
TEST_P(GroupedProduct, OfEveryConfig) {
  for (int config = 0; on_cuda() && config < int(std::size(kConfigs)); ++config) {
    cuda::forced_config = config;
    for (DType dtype : dtypes()) {
      SCOPED_TRACE(testing::Message() << "config " << config << " " << name_of(dtype));
      for (bool b_flipped : {false, true}) {
        run({.ragged = Ragged::rows,
             .counts = {512, 0, 256, 30},
             .m = 820,
             .n = 264,
             .k = 328,
             .b_flipped = b_flipped,
             .bias = b_flipped},
            dtype);
      }
      for (bool d_flipped : {false, true}) {
        run({.ragged = Ragged::inner,
             .counts = {300, 0, 64, 17},
             .m = 520,
             .n = 264,
             .k = 384,
             .a_flipped = true,
             .d_flipped = d_flipped,
             .accumulate = d_flipped},
            dtype);
      }
    }
    cuda::forced_config = -1;
  }
}

GUILD_DEVICE_TESTS(GroupedProduct);

}  // namespace

}  // namespace guild::test
