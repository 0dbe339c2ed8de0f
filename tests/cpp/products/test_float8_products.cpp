// Products of codes: CUDA's sums against the CPU's, within the precision of tensor cores' sums.
#include <random>

#include "device_test.h"
#include "twin.h"

namespace guild::test {

namespace {

constexpr int32_t kCounts[] = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 0, 300};
constexpr int64_t kGroups = std::size(kCounts);
constexpr int64_t kSpare = 9;  // rows of no group

int64_t blocks(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

double precision(DType dtype) {
  return dtype == DType::float32 ? 0x1p-23 : dtype == DType::float16 ? 0x1p-10 : 0x1p-7;
}

class Float8Products : public DeviceTest {
 protected:
  // Finite codes, of at most 8 so that float16 holds the sums.
  std::vector<uint8_t> codes(int64_t count, Float8 format) {
    std::uniform_int_distribution<int> magnitude(0, format == Float8::e4m3 ? 0x50 : 0x48);
    std::vector<uint8_t> made(count);
    for (uint8_t& code : made) code = uint8_t(magnitude(random_) | (random_() & 1) << 7);
    return made;
  }
  std::vector<float> scales(int64_t count) {
    std::uniform_real_distribution<float> around_1(.5f, 2.f);
    std::vector<float> made(count);
    for (float& scale : made) scale = around_1(random_);
    return made;
  }
  // Where groups end, a 0 before them.
  static std::vector<int32_t> offsets() {
    std::vector<int32_t> all{0};
    for (int32_t const count : kCounts) all.push_back(all.back() + count);
    return all;
  }

  std::mt19937_64 random_{11};
};

// The codes without signs: their product is the total magnitude of a sum's terms.
std::vector<uint8_t> unsigned_codes(std::vector<uint8_t> codes) {
  for (uint8_t& code : codes) code &= 0x7f;
  return codes;
}

// How far a sum may be off, relative to its terms' magnitude. Tensor cores add 32 terms and the sum
// so far at once, each truncated 13 bits below the largest. For such codes a simulation of that is
// off by up to 0x1.4p-11 in 400,000 sums; with 12 bits, by more than this.
constexpr double kKept = 0x1p-10;

void expect_near(std::vector<Left> const& got, std::vector<Left> const& want,
                 std::vector<Left> const& size, DType dtype) {
  int64_t const bytes = bytes_of(dtype), count = int64_t(got[0].bytes.size()) / bytes;
  for (int64_t i = 0; i < count; ++i) {
    double const g = decode(dtype, &got[0].bytes[i * bytes]);
    double const w = decode(dtype, &want[0].bytes[i * bytes]);
    double const s = decode(DType::float32, &size[0].bytes[i * 4]);
    double const bound = kKept * s + precision(dtype) * std::abs(w) + 1e-30;
    ASSERT_LE(std::abs(g - w), bound) << "element " << i << ": " << g << ", on the CPU " << w;
  }
}

TEST_P(Float8Products, Rows) {
  auto const ends = offsets();
  int64_t const m = ends.back() + kSpare, n = 272;
  int turn = 0;
  for (int64_t const k : {16, 272, 720}) {
    for (int64_t const halves : {1, 2}) {
      for (DType const dtype : {DType::bfloat16, DType::float16, DType::float32}) {
        // CUDA adds biases to 16-bit results alone.
        bool const bias = ++turn % 2 && dtype != DType::float32, turned = turn % 3 == 0;
        auto const format = Float8(turn / 2 % 2);
        int64_t const across = halves * blocks(k), down = blocks(n);
        auto const a = codes(m * halves * k, format);
        auto const b = codes(kGroups * n * halves * k, Float8::e4m3);
        auto const a_scales = scales(m * across), b_scales = scales(kGroups * down * across);
        auto const fill = [&](bool sizes) {
          DType const out = sizes ? DType::float32 : dtype;
          return [&, sizes, out](Operands& operands) {
            ScaledGroupedGemm x;
            x.m = m, x.n = n, x.k = k, x.groups = kGroups, x.halves = halves;
            x.a_format = format, x.out_dtype = out;
            x.offsets = operands.in(std::vector<int32_t>(ends.begin() + 1, ends.end()));
            x.a = {operands.in(sizes ? unsigned_codes(a) : a)};
            x.a_scales = {operands.in(a_scales), 0, turned ? 1 : across, turned ? m : 1};
            auto const* const weights = operands.in(sizes ? unsigned_codes(b) : b);
            x.b = {weights, n * halves * k, halves * k, 1};
            x.b_scales = {operands.in(b_scales), down * across, across, 1};
            auto const b_start = normal(out, kGroups, n, 5);
            if (bias && !sizes) x.bias = {operands.in(b_start)};
            x.d = {operands.out<std::byte>("d", m * n * bytes_of(out))};
            return AnyStep(x);
          };
        };
        SCOPED_TRACE(testing::Message() << "K " << k << " x " << halves << ", turn " << turn);
        auto const got = left_by(device(), fill(false)), want = left_by(cpu_device(), fill(false));
        auto const size = left_by(cpu_device(), fill(true));
        expect_near(got, want, size, dtype);
        std::vector<std::byte> const zeros(kSpare * n * bytes_of(dtype));
        auto const& bytes = got[0].bytes;
        EXPECT_TRUE(std::equal(zeros.begin(), zeros.end(), bytes.end() - int64_t(zeros.size())));
      }
    }
  }
}

// Chunks of `columns` columns of all groups. What no product may read is NaN.
struct ChunksOnHost {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  int64_t columns;

  ConstChunks in(Operands& operands, bool sizes) const {
    ConstChunks x;
    x.codes = operands.in(sizes ? unsigned_codes(codes) : codes);
    x.scales = {operands.in(scales), 0, blocks(columns), 1};
    return x;
  }
};

ChunksOnHost chunks_of(std::vector<int32_t> const& offsets, int64_t columns,
                       std::vector<uint8_t> codes, std::vector<float> scales) {
  int64_t const slots = chunk_slots(offsets.back() + kSpare, kGroups);
  std::vector<int64_t> rows(slots, 0);
  for (int64_t e = 0; e < kGroups; ++e) {
    for (int64_t j = 0; j * kScaleBlock < kCounts[e]; ++j) {
      rows[offsets[e] / kScaleBlock + e + j] = std::min(kScaleBlock, kCounts[e] - j * kScaleBlock);
    }
  }
  for (int64_t i = 0; i < int64_t(codes.size()); ++i) {
    int64_t const slot = i / (columns * kScaleBlock);
    if (rows[slot] == 0) codes[i] = 0x7f;
    if (i % kScaleBlock >= rows[slot] && rows[slot] > 0) codes[i] = 0;
  }
  for (int64_t i = 0; i < int64_t(scales.size()); ++i) {
    if (rows[i / blocks(columns)] == 0) scales[i] = std::nanf("");
  }
  return {std::move(codes), std::move(scales), columns};
}

TEST_P(Float8Products, Chunks) {
  auto const ends = offsets();
  int64_t const rows = ends.back() + kSpare, slots = chunk_slots(rows, kGroups);
  int turn = 0;
  for (int64_t const out : {48, 272}) {
    for (int64_t const in : {16, 400}) {
      for (DType const dtype : {DType::bfloat16, DType::float16, DType::float32}) {
        bool const adds = ++turn % 2, turned = turn / 2 % 2;
        auto const format = Float8(turn % 3 == 0);
        auto const make = [&](int64_t columns, Float8 of) {
          auto const made = codes(slots * columns * kScaleBlock, of);
          return chunks_of(ends, columns, made, scales(slots * blocks(columns)));
        };
        auto const a = make(out, format), b = make(in, Float8::e4m3);
        auto const fill = [&](bool sizes) {
          DType const stored = sizes ? DType::float32 : dtype;
          return [&, sizes, stored](Operands& operands) {
            ChunkProduct x;
            x.rows = rows, x.groups = kGroups, x.out = out, x.in = in;
            x.a_format = format, x.d_dtype = stored, x.accumulate = adds && !sizes;
            x.offsets = operands.in(ends);
            x.a = a.in(operands, sizes), x.b = b.in(operands, sizes);
            void* const d = operands.added_to("d", normal(stored, kGroups * out, in, 3));
            x.d = turned ? Weight{d, out * in, 1, out} : Weight{d, out * in, in, 1};
            return AnyStep(x);
          };
        };
        SCOPED_TRACE(testing::Message() << out << " x " << in << ", turn " << turn);
        auto const got = left_by(device(), fill(false)), want = left_by(cpu_device(), fill(false));
        expect_near(got, want, left_by(cpu_device(), fill(true)), dtype);
      }
    }
  }
}

GUILD_DEVICE_TESTS(Float8Products);

}  // namespace
}  // namespace guild::test
