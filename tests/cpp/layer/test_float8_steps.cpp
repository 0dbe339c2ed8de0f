// The steps that quantise their results, CUDA against the CPU: scales are equal except where a
// largest value lies at the edge of a power of two, and few codes are off by one.
#include <random>

#include "layer_test.h"
#include "shared/float8.h"
#include "twin.h"

namespace guild::test {

namespace {

// Tensor cores cut terms off 13 bits below the largest. In a simulation that moves .2 to .9 % of
// codes, and small values by up to 0x1.2p-13 of the largest that a block can hold; with 12 bits it
// would be 2 % and 0x1.bp-11.
constexpr double kMostOtherCodes = .015, kLost = 0x1p-11;

int64_t blocks(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

struct StepParam {
  Case shape;
  int variant = 0;
  bool on_cuda = false;

  bool bias() const { return variant == 1; }
  NamedActivation const& act() const {
    char const* const names[] = {"swiglu", "gpt_oss", "relu_squared"};
    for (NamedActivation const& a : activations()) {
      if (a.name == names[variant]) return a;
    }
    throw std::logic_error("tests/activations.csv: no such activation");
  }
  bool gated() const { return act().activation.gated; }
  int64_t halves() const { return gated() ? 2 : 1; }
  GateUp order() const { return variant == 1 ? GateUp::interleaved : GateUp::concatenated; }
  DType dtype() const { return variant == 1 ? DType::float16 : DType::bfloat16; }
  ScaleKind scale() const { return ScaleKind(variant != 2); }
  Float8 gradients() const { return Float8(variant == 2); }
  std::string name() const { return shape.name + "_" + act().name + (on_cuda ? "_cuda" : "_cpu"); }
};

// The cases of tests/cases.csv with widths that FP8 takes, and one with several blocks of 128 and a
// part of one in each sum.
std::vector<StepParam> step_params(bool quick) {
  std::vector<Case> shapes;
  for (Case c : cases()) {
    c.quick |= c.name == "tail_rows";
    if (c.cpu_only || c.matrix || c.quick != quick) continue;
    for (int64_t* size : {&c.sizes.hidden, &c.sizes.intermediate}) *size = (*size + 15) / 16 * 16;
    shapes.push_back(c);
  }
  Case wide;
  wide.name = "wide", wide.sizes = {320, 720, 272, 12, 2};
  wide.routing = "0|1|15|16|17|63|64|65|127|128|129|15";
  if (!quick) shapes.push_back(wide);
  char const* why = "";
  std::vector<StepParam> all;
  for (Case const& c : shapes) {
    for (int variant = 0; variant < 3; ++variant) {
      all.push_back({c, variant, false});
      if (cuda_device(&why) != nullptr) all.push_back({c, variant, true});
    }
  }
  return all;
}

// A matrix of codes on the host: rows with a scale for 128 columns, or a weight's blocks.
struct Quantised {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

class Float8Steps : public testing::TestWithParam<StepParam> {
 protected:
  void SetUp() override {
    StepParam const& p = GetParam();
    s = p.shape.sizes;
    rowing = rowing_of(p.shape, 3);
    std::mt19937_64 random(4);
    std::uniform_real_distribution<float> part(.1f, 1.f);
    for (int64_t r = 0; r < s.rows(); ++r) row_score.push_back(part(random));
  }
  Device& device() const {
    char const* why = "";
    return GetParam().on_cuda ? *cuda_device(&why) : cpu_device();
  }
  bool gathers() const { return !GetParam().shape.sorted; }
  int64_t width() const { return GetParam().halves() * s.intermediate; }

  Quantised rows(int64_t columns, Float8 format, uint64_t seed) const {
    int64_t const count = gathers() ? s.tokens : s.rows();
    auto const x = normal(DType::bfloat16, count, columns, seed);
    Quantised made{std::vector<uint8_t>(count * columns),
                   std::vector<float>(count * blocks(columns))};
    QuantizeRows q;
    q.rows = count, q.columns = columns, q.format = format, q.scale = GetParam().scale();
    q.x = {x.data()}, q.codes = {made.codes.data()};
    q.scales = {made.scales.data(), 0, blocks(columns), 1};
    cpu_device().run(q);
    return made;
  }
  // (E, halves * out, in), or with `out` contiguous.
  Quantised weights(int64_t halves, int64_t out, int64_t in, bool turned, uint64_t seed) const {
    int64_t const height = halves * out, across = blocks(in), down = halves * blocks(out);
    auto const w = normal(DType::bfloat16, s.experts * height, in, seed, 1 / std::sqrt(double(in)));
    Quantised made{std::vector<uint8_t>(w.size() / 2),
                   std::vector<float>(s.experts * down * across)};
    std::vector<uint8_t> other(made.codes.size());
    QuantizeWeights q;
    q.experts = s.experts, q.out = out, q.in = in, q.scale = GetParam().scale();
    q.w.gate = {w.data(), height * in, in, 1};
    if (halves == 2) q.w.up = {&w[2 * out * in], height * in, in, 1};
    q.codes = {(turned ? other : made.codes).data(), height * in, in, 1};
    if (turned) q.transposed = {made.codes.data(), height * in, 1, height};
    q.scales = {made.scales.data(), down * across, across, 1};
    cpu_device().run(q);
    return made;
  }
  // H (R, W) in halves, as codes whose scales are powers of two.
  Quantised codes_of(std::vector<std::byte> const& h) const {
    int64_t const count = s.rows(), halves = GetParam().halves(), across = blocks(s.intermediate);
    Quantised made{std::vector<uint8_t>(count * width()),
                   std::vector<float>(count * halves * across)};
    for (int64_t half = 0; half < halves; ++half) {
      int64_t const begin = half * s.intermediate;
      QuantizeRows q;
      q.rows = count, q.columns = s.intermediate, q.dtype = GetParam().dtype();
      q.scale = ScaleKind::power_of_two;
      q.x = {h.data() + begin * bytes_of(q.dtype), width()},
      q.codes = {made.codes.data() + begin, width()};
      q.scales = {made.scales.data() + half * across, 0, halves * across, 1};
      cpu_device().run(q);
    }
    return made;
  }
  Routing routing(Operands& m) const {
    Routing r;
    r.offsets = m.in(rowing.offsets);
    r.row_score = m.in(row_score);
    if (gathers()) r.row_token = m.in(rowing.row_token);
    return r;
  }

  // A down gradient with no result other than dH's codes.
  ScaledDownGradient down_gradient(Operands& m, Quantised const& dout, Quantised const& w) const {
    StepParam const& p = GetParam();
    int64_t const of_h = p.halves() * blocks(s.intermediate), across = blocks(s.intermediate);
    ScaledDownGradient d;
    d.sizes = s, d.dtype = p.dtype(), d.activation = p.act().activation, d.order = p.order();
    d.routing = routing(m), d.scale = p.scale();
    d.dout_format = d.format = p.gradients();
    d.dout = {m.in(dout.codes)}, d.dout_scales = {m.in(dout.scales), 0, blocks(s.hidden), 1};
    d.w_down = {m.in(w.codes), s.hidden * s.intermediate, 1, s.hidden};
    d.w_scales = {m.in(w.scales), blocks(s.hidden) * across, across, 1};
    d.dh_codes = {m.out<uint8_t>("dh", s.rows() * width())};
    d.dh_scales = {m.out<float>("dh_scales", s.rows() * of_h), 0, of_h, 1};
    return d;
  }
  // Room for dH and A' in the layer's dtype.
  void want_values(ScaledDownGradient& d, Operands& m) const {
    int64_t const size = bytes_of(d.dtype);
    d.dh = {m.out<std::byte>("dh_values", s.rows() * width() * size)};
    d.a_scaled = {m.out<std::byte>("a_scaled", s.rows() * s.intermediate * size)};
  }
  Chunks chunks(Operands& m, char const* codes, char const* scales, int64_t halves) const {
    int64_t const slots = chunk_slots(s.rows(), s.experts),
                  across = halves * blocks(s.intermediate);
    auto* const room = m.out<uint8_t>(codes, slots * halves * s.intermediate * kScaleBlock);
    return {room, {m.out<float>(scales, slots * across), 0, across, 1}};
  }
  QuantizeChunks quantiser(Operands& m, int64_t halves, Float8 format) const {
    QuantizeChunks q;
    q.rows = s.rows(), q.groups = s.experts, q.columns = s.intermediate, q.halves = halves;
    q.dtype = GetParam().dtype(), q.format = format, q.offsets = m.in(rowing.offsets);
    Chunks const room = chunks(m, "chunks", "chunk_scales", halves);
    q.codes = room.codes, q.scales = room.scales;
    return q;
  }
  // Compares the slots that hold a chunk; the others were not written.
  void expect_chunks(std::vector<Left> const& got, std::string const& name,
                     std::vector<Left> const& want) const;

  void expect_codes(std::vector<Left> const& got, std::vector<Left> const& want, char const* name,
                    int64_t columns, Float8 format) const;
  void expect_values(std::vector<Left> const& got, std::vector<Left> const& want, char const* name,
                     int64_t columns, DType dtype, double most) const;

  Sizes s;
  Rowing rowing;
  std::vector<float> row_score;
};

Left const& named(std::vector<Left> const& all, std::string const& name) {
  for (Left const& left : all) {
    if (left.name == name) return left;
  }
  throw std::logic_error(name + ": no such output");
}

void Float8Steps::expect_codes(std::vector<Left> const& got, std::vector<Left> const& want,
                               char const* name, int64_t columns, Float8 format) const {
  SCOPED_TRACE(name);
  std::string const of_scales = std::string(name) + "_scales";
  auto const mine = named(got, name).as<uint8_t>(), theirs = named(want, name).as<uint8_t>();
  auto const my_scales = named(got, of_scales).as<float>();
  auto const their_scales = named(want, of_scales).as<float>();
  int64_t const rows = s.rows(), used = rowing.used(), across = blocks(s.intermediate);
  int64_t const all_across = columns / s.intermediate * across;
  int64_t other = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      int64_t const block = c / s.intermediate * across + c % s.intermediate / kScaleBlock;
      int64_t const at = r * columns + c, scale_at = r * all_across + block;
      if (r >= used) {
        ASSERT_EQ(mine[at], 0xa7) << "row " << r << " of no expert was written";
        continue;
      }
      float const scale = my_scales[scale_at], their_scale = their_scales[scale_at];
      double const g = double(decode_float8(mine[at], format)) * scale;
      double const w = double(decode_float8(theirs[at], format)) * their_scale;
      bool const power_of_two = GetParam().scale() == ScaleKind::power_of_two;
      double const ratio = double(scale) / their_scale;
      bool const same =
          power_of_two ? ratio == 1 || ratio == 2 || ratio == .5 : std::abs(ratio - 1) < 0x1p-8;
      ASSERT_TRUE(same) << "row " << r << ", column " << c << ": scale " << scale << ", on the CPU "
                        << their_scale;
      // A neighbouring code is at most an eighth or, with two mantissa bits, a quarter away. Small
      // values are what larger terms leave when they cancel.
      double const step = std::max(std::abs(w) / (format == Float8::e4m3 ? 7 : 3),
                                   std::max(scale, their_scale) * largest_of(format) * kLost);
      ASSERT_LE(std::abs(g - w), step) << "row " << r << ", column " << c;
      other += mine[at] != theirs[at];
    }
  }
  double const expected = kMostOtherCodes * double(used * columns);
  EXPECT_LE(double(other), expected + 4 * std::sqrt(expected) + 2);
}

void Float8Steps::expect_values(std::vector<Left> const& got, std::vector<Left> const& want,
                                char const* name, int64_t columns, DType dtype, double most) const {
  auto const &mine = named(got, name).bytes, &theirs = named(want, name).bytes;
  int64_t const size = bytes_of(dtype), count = rowing.used() * columns;
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < count; ++i) {
    double const g = decode(dtype, &mine[i * size]), w = decode(dtype, &theirs[i * size]);
    difference += (g - w) * (g - w), norm += w * w;
  }
  EXPECT_LE(std::sqrt(difference), most * std::sqrt(norm)) << name;
  for (size_t i = size_t(count * size); i < mine.size(); ++i) {
    ASSERT_EQ(int(mine[i]), 0xa7) << name << ": a row of no expert was written";
  }
}

TEST_P(Float8Steps, Up) {
  StepParam const& p = GetParam();
  auto const x = rows(s.hidden, Float8::e4m3, 1);
  auto const w = weights(p.halves(), s.intermediate, s.hidden, false, 2);
  auto const bias = normal(p.dtype(), s.experts, width(), 3, .3);
  int64_t const across = blocks(s.hidden), of_a = blocks(s.intermediate);
  bool const keeps = p.variant != 2, keeps_codes = p.variant == 1;
  auto const fill = [&](Operands& m) -> AnyStep {
    ScaledUp u;
    u.sizes = s, u.dtype = p.dtype(), u.activation = p.act().activation, u.order = p.order();
    u.routing = routing(m), u.scale = p.scale();
    u.x = {m.in(x.codes)}, u.x_scales = {m.in(x.scales), 0, across, 1};
    int64_t const half = s.intermediate * s.hidden, half_scales = of_a * across;
    uint8_t const* const codes = m.in(w.codes);
    float const* const scales = m.in(w.scales);
    u.w_up.gate = {codes, p.halves() * half, s.hidden, 1};
    u.w_scales.gate = {scales, p.halves() * half_scales, across, 1};
    u.w_up.up = u.w_up.gate, u.w_scales.up = u.w_scales.gate;
    if (p.gated()) u.w_up.up.data = codes + half, u.w_scales.up.data = scales + half_scales;
    if (p.bias()) u.bias = {m.in(bias)};
    u.a = {m.out<uint8_t>("a", s.rows() * s.intermediate)};
    u.a_scales = {m.out<float>("a_scales", s.rows() * of_a), 0, of_a, 1};
    if (keeps_codes) {
      u.h_codes = {m.out<uint8_t>("h", s.rows() * width())};
      int64_t const of_h = p.halves() * of_a;
      u.h_scales = {m.out<float>("h_scales", s.rows() * of_h), 0, of_h, 1};
    } else if (keeps) {
      u.h = {m.out<std::byte>("h", s.rows() * width() * bytes_of(p.dtype()))};
    }
    return u;
  };
  auto const got = left_by(device(), fill), want = left_by(cpu_device(), fill);
  expect_codes(got, want, "a", s.intermediate, Float8::e4m3);
  if (keeps_codes) expect_codes(got, want, "h", width(), Float8::e4m3);
  if (keeps && !keeps_codes) expect_values(got, want, "h", width(), p.dtype(), 0x1p-8);
}

void Float8Steps::expect_chunks(std::vector<Left> const& got, std::string const& name,
                                std::vector<Left> const& want) const {
  int64_t const slots = chunk_slots(s.rows(), s.experts);
  std::vector<bool> used(slots);
  for (int64_t e = 0; e < s.experts; ++e) {
    int64_t const begin = rowing.offsets[e], count = rowing.offsets[e + 1] - begin;
    for (int64_t j = 0; j < blocks(count); ++j) used[begin / kScaleBlock + e + j] = true;
  }
  for (char const* const part : {"s", "_scales"}) {
    SCOPED_TRACE(name + part);
    auto const& mine = named(got, name + part).bytes;
    auto const& theirs = named(want, std::string("chunk") + part).bytes;
    ASSERT_EQ(mine.size(), theirs.size());
    size_t const size = mine.size() / size_t(slots);
    for (int64_t slot = 0; slot < slots; ++slot) {
      auto const first = mine.begin() + slot * int64_t(size), other = theirs.begin() + slot * size;
      bool const same = std::equal(first, first + size, other);
      ASSERT_TRUE(same) << "slot " << slot << (used[slot] ? "" : ", which no chunk has");
    }
  }
}

TEST_P(Float8Steps, DownGradient) {
  StepParam const& p = GetParam();
  auto const dout = rows(s.hidden, p.gradients(), 1);
  auto const w = weights(1, s.hidden, s.intermediate, true, 2);
  auto const h = normal(p.dtype(), s.rows(), width(), 3);
  auto const fill = [&](Operands& m) -> AnyStep {
    ScaledDownGradient d = down_gradient(m, dout, w);
    d.h = {m.in(h)};
    if (p.variant == 2) return d;
    want_values(d, m);
    d.score_parts = m.out<std::byte>("score_parts", s.rows() * score_parts(s) * 4);
    return d;
  };
  auto const got = left_by(device(), fill), want = left_by(cpu_device(), fill);
  expect_codes(got, want, "dh", width(), p.gradients());
  if (p.variant == 2) return;
  expect_values(got, want, "dh_values", width(), p.dtype(), 0x1p-7);
  expect_values(got, want, "a_scaled", s.intermediate, p.dtype(), 0x1p-7);
  expect_values(got, want, "score_parts", score_parts(s), DType::float32, .01);
}

// The chunks of a step equal, bit for bit, those that the quantiser makes of the step's other
// results, whether these are wanted or not; with H in 16 bits and, where CUDA reads them, codes.
TEST_P(Float8Steps, ChunksOfTheDownGradient) {
  StepParam const& p = GetParam();
  auto const dout = rows(s.hidden, p.gradients(), 1);
  auto const w = weights(1, s.hidden, s.intermediate, true, 2);
  auto const h = normal(p.dtype(), s.rows(), width(), 3);
  auto const h_codes = codes_of(h);
  int64_t const of_h = p.halves() * blocks(s.intermediate);
  for (bool const reads_codes : {false, true}) {
    if (reads_codes && p.variant != 0) continue;
    SCOPED_TRACE(reads_codes ? "H of codes" : "H in 16 bits");
    auto const made = [&](bool has_values, bool has_chunks) {
      return left_by(device(), [&](Operands& m) -> AnyStep {
        ScaledDownGradient d = down_gradient(m, dout, w);
        d.scale = ScaleKind::power_of_two;
        if (reads_codes) {
          d.h_codes = {m.in(h_codes.codes)}, d.h_scales = {m.in(h_codes.scales), 0, of_h, 1};
        } else {
          d.h = {m.in(h)};
        }
        if (has_values) want_values(d, m);
        if (!has_chunks) return d;
        d.dh_chunks = chunks(m, "dh_chunks", "dh_chunk_scales", p.halves());
        d.a_chunks = chunks(m, "a_chunks", "a_chunk_scales", 1);
        return d;
      });
    };
    auto const apart = made(true, false);
    auto const dh = named(apart, "dh").as<uint8_t>();
    auto const dh_scales = named(apart, "dh_scales").as<float>();
    auto const of_dh = left_by(cpu_device(), [&](Operands& m) {
      QuantizeChunks q = quantiser(m, p.halves(), p.gradients());
      q.x = {m.in(dh)}, q.x_scales = {m.in(dh_scales), 0, of_h, 1};
      return q;
    });
    auto const of_a = left_by(cpu_device(), [&](Operands& m) {
      QuantizeChunks q = quantiser(m, 1, Float8::e4m3);
      q.x = {m.in(named(apart, "a_scaled").bytes)};
      return q;
    });
    for (bool const has_values : {false, true}) {
      auto const got = made(has_values, true);
      expect_chunks(got, "dh_chunk", of_dh);
      expect_chunks(got, "a_chunk", of_a);
      EXPECT_EQ(named(got, "dh").bytes, named(apart, "dh").bytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Quick, Float8Steps, testing::ValuesIn(step_params(true)),
                         [](auto const& info) { return info.param.name(); });
INSTANTIATE_TEST_SUITE_P(Full, Float8Steps, testing::ValuesIn(step_params(false)),
                         [](auto const& info) { return info.param.name(); });

}  // namespace
}  // namespace guild::test
