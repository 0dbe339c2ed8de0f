// The quantisers: CUDA gives the CPU's bits, for every number of rows at which a kernel's last
// block or a last chunk changes.
#include <cmath>

#include "device_test.h"
#include "shared/float8.h"
#include "twin.h"

namespace guild::test {

namespace {

constexpr int64_t kRows[] = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129};
constexpr DType kElements[] = {DType::bfloat16, DType::float16, DType::float32};

int64_t blocks(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

// Ends of groups with so many rows each, the first 0.
std::vector<int32_t> offsets_of_rows() {
  std::vector<int32_t> offsets{0};
  for (int64_t const rows : kRows) offsets.push_back(offsets.back() + int32_t(rows));
  return offsets;
}

// Infinities here and there among E5M2's codes, where a quantiser gives none.
void put_infinities(std::vector<uint8_t>& codes, Float8 format) {
  if (format != Float8::e5m2) return;
  for (size_t i = 3; i < codes.size(); i += 53) codes[i] = kE5M2Infinity | (i % 2 ? 0x80 : 0);
}

class Float8Quantisers : public DeviceTest {
 protected:
  void expect_as_on_cpu(Fill const& fill) { test::expect_as_on_cpu(device(), fill); }
};

TEST_P(Float8Quantisers, Rows) {
  uint64_t seed = 0;
  for (int64_t const rows : kRows) {
    for (int64_t const columns : {33, 272}) {
      for (DType const dtype : kElements) {
        auto const format = Float8(++seed % 2);
        auto const scale = ScaleKind(seed / 2 % 2);
        bool const apart = seed % 2 == 0, turned = seed % 5 == 0;
        int64_t const stride = columns + (apart ? 16 : 0), width = blocks(columns);
        auto const x = awkward(dtype, rows, stride, seed);
        SCOPED_TRACE(testing::Message() << rows << " x " << columns << ", seed " << seed);
        expect_as_on_cpu([&](Operands& m) {
          QuantizeRows q;
          q.rows = rows, q.columns = columns, q.dtype = dtype;
          q.format = format, q.scale = scale;
          q.x = {m.in(x), stride};
          q.codes = {m.out<uint8_t>("codes", rows * stride), stride};
          q.scales = {m.out<float>("scales", rows * width)};
          q.scales.row_stride = turned ? 1 : width, q.scales.col_stride = turned ? rows : 1;
          return q;
        });
      }
    }
  }
}

// A weight (2, halves * out, in) in one of its orders in memory.
ConstUpWeight weight_in(void const* data, int64_t out, int64_t in, bool gated, GateUp order,
                        bool transposed, DType dtype) {
  Sizes const sizes{1, in, out, 2, 1};
  return up_weight<ConstWeight>(data, sizes, gated, order, transposed, bytes_of(dtype));
}

TEST_P(Float8Quantisers, Weights) {
  uint64_t seed = 0;
  for (int64_t const out : {1, 15, 64, 129}) {
    for (int64_t const in : {16, 272}) {
      for (int way = 0; way < 8; ++way) {
        bool const gated = way & 1, transposed = way & 2, both = way & 4;
        DType const dtype = kElements[++seed % 3];
        auto const order = GateUp(gated ? seed / 2 % 2 : 0);
        int64_t const height = out * (gated ? 2 : 1);
        auto const w = awkward(dtype, 2 * height, in, seed);
        SCOPED_TRACE(testing::Message() << height << " x " << in << ", way " << way);
        expect_as_on_cpu([&](Operands& m) {
          QuantizeWeights q;
          q.experts = 2, q.out = out, q.in = in, q.dtype = dtype;
          q.format = Float8(way / 2 % 2), q.scale = ScaleKind(seed % 2);
          q.w = weight_in(m.in(w), out, in, gated, order, transposed, dtype);
          if (!gated) q.w.up.data = nullptr;
          q.codes = {m.out<uint8_t>("codes", 2 * height * in), height * in, in, 1};
          if (both) {
            int64_t const next = height == 1 ? 5 : 1;  // of a single element, any stride
            auto* const turned = m.out<uint8_t>("transposed", 2 * height * in);
            q.transposed = {turned, height * in, next, height};
          }
          int64_t const down = (gated ? 2 : 1) * blocks(out), across = blocks(in);
          q.scales = {m.out<float>("scales", 2 * down * across), down * across, across, 1};
          return q;
        });
      }
    }
  }
}

// All arguments but x and its type.
QuantizeChunks chunks_of(Operands& m, std::vector<int32_t> const& offsets, int64_t columns,
                         int64_t halves, std::vector<int32_t> const& row_token, int64_t tokens) {
  int64_t const rows = offsets.back() + 9, groups = int64_t(offsets.size()) - 1;
  int64_t const slots = chunk_slots(rows, groups), width = halves * blocks(columns);
  QuantizeChunks q;
  q.rows = rows, q.groups = groups, q.tokens = tokens;
  q.columns = columns, q.halves = halves;
  q.offsets = m.in(offsets);
  if (!row_token.empty()) q.row_token = m.in(row_token);
  q.codes = m.out<uint8_t>("codes", slots * halves * columns * kScaleBlock);
  q.scales = {m.out<float>("scales", slots * width), 0, width, 1};
  return q;
}

TEST_P(Float8Quantisers, Chunks) {
  auto const offsets = offsets_of_rows();
  int64_t const rows = offsets.back() + 9, tokens = 200;  // 9 rows belong to no group
  std::vector<int32_t> row_token(rows);
  for (int64_t r = 0; r < rows; ++r) {  // some name no token
    row_token[r] = r % 50 == 7 ? (r % 100 == 7 ? -1 : int32_t(tokens)) : int32_t(r * 37 % tokens);
  }
  uint64_t seed = 0;
  for (int64_t const columns : {48, 272}) {
    for (int64_t const halves : {1, 2}) {
      for (int way = 0; way < 8; ++way) {
        bool const gathers = way & 1, has_codes = way & 2;
        auto const format = Float8(way / 4);
        DType const dtype = kElements[++seed % 3];
        int64_t const height = gathers ? tokens : rows, width = halves * columns;
        int64_t const across = halves * blocks(columns);
        auto const x = awkward(dtype, height, width, seed);
        std::vector<uint8_t> codes(height * width);
        std::vector<float> scales(height * across);
        for (int64_t half = 0; half < halves; ++half) {  // which share no block
          int64_t const begin = half * columns;
          QuantizeRows q;
          q.rows = height, q.columns = columns, q.dtype = dtype;
          q.format = format, q.scale = ScaleKind::power_of_two;
          q.x = {&x[begin * bytes_of(dtype)], width};
          q.codes = {&codes[begin], width};
          q.scales = {&scales[half * blocks(columns)], 0, across, 1};
          cpu_device().run(q);
        }
        put_infinities(codes, format);
        SCOPED_TRACE(testing::Message() << columns << " columns, seed " << seed);
        expect_as_on_cpu([&](Operands& m) {
          auto const of_rows = gathers ? row_token : std::vector<int32_t>{};
          QuantizeChunks q = chunks_of(m, offsets, columns, halves, of_rows, tokens);
          q.dtype = dtype, q.format = format, q.scale = ScaleKind(seed / 3 % 2);
          q.x = {has_codes ? static_cast<void const*>(m.in(codes)) : m.in(x)};
          if (has_codes) q.x_scales = {m.in(scales), 0, across, 1};
          return q;
        });
      }
    }
  }
}

TEST_P(Float8Quantisers, Microscaling) {
  uint64_t seed = 0;
  float const globals[] = {.37f, 0, 0x1p-149f, INFINITY};  // of those, one is useful
  for (int64_t const rows : kRows) {
    for (int64_t const columns : {34, 272}) {
      for (int format = 0; format < 3; ++format) {
        bool const narrow = Microscaling(format) == Microscaling::nvfp4, given = ++seed % 2;
        DType const dtype = kElements[seed % 3];
        auto const order = ScaleOrder(seed / 3 % 2);
        auto const x = awkward(dtype, rows, columns, seed);
        int64_t const width = narrow ? columns / 2 : columns;
        SCOPED_TRACE(testing::Message() << rows << " x " << columns << ", format " << format);
        expect_as_on_cpu([&](Operands& m) {
          QuantizeMicro q;
          q.rows = rows, q.columns = columns, q.dtype = dtype, q.order = order;
          q.format = Microscaling(format), q.rounding = MicroRounding(seed % 2);
          q.x = {m.in(x)};
          q.codes = {m.out<uint8_t>("codes", rows * width)};
          q.scales = m.out<uint8_t>("scales", micro_scale_bytes(rows, columns, q.format, order));
          q.global_given = narrow && given;
          if (narrow) {
            float const scale = globals[seed / 2 % 4];
            std::vector<std::byte> const start(reinterpret_cast<std::byte const*>(&scale),
                                               reinterpret_cast<std::byte const*>(&scale + 1));
            q.global = static_cast<float*>(m.added_to("global", start));
            q.workspace = m.scratch<uint32_t>(1);
          }
          return q;
        });
      }
    }
  }
}

TEST_P(Float8Quantisers, Regrouping) {
  uint64_t seed = 0;
  for (int64_t const rows : kRows) {
    for (int64_t const columns : {40, 272}) {
      auto const format = Float8(++seed % 2);
      auto const x = awkward(DType::float32, rows, columns, seed);
      int64_t const groups = (columns + 31) / 32;
      std::vector<uint8_t> codes(rows * columns), scales(rows * groups);
      QuantizeMicro q;
      q.rows = rows, q.columns = columns, q.dtype = DType::float32;
      q.format = Microscaling(format);
      q.x = {x.data()}, q.codes = {codes.data()}, q.scales = scales.data();
      cpu_device().run(q);
      put_infinities(codes, format);
      SCOPED_TRACE(testing::Message() << rows << " x " << columns);
      expect_as_on_cpu([&](Operands& m) {
        RegroupMicro r;
        r.rows = rows, r.columns = columns, r.format = format;
        r.x = {m.in(codes)};
        r.x_scales = m.in(scales);
        r.codes = {m.out<uint8_t>("codes", rows * columns)};
        r.scales = {m.out<float>("scales", rows * blocks(columns)), 0, blocks(columns), 1};
        return r;
      });
    }
  }
}

GUILD_DEVICE_TESTS(Float8Quantisers);

}  // namespace
}  // namespace guild::test
