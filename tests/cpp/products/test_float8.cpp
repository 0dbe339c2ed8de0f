// The arithmetic of FP8, MXFP8 and NVFP4 blocks: rounding, scales, where scales and chunks lie.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <set>

#include "guild/float8_chunks.h"
#include "shared/microscaling.h"

namespace guild {
namespace {

constexpr Float8 kFormats[] = {Float8::e4m3, Float8::e5m2};

// Magnitudes of all finite codes, rising with the code.
std::vector<float> values_of(Float8 format) {
  std::vector<float> all;
  for (int code = 0; code <= format_of(format).largest; ++code) {
    all.push_back(decode_float8(uint8_t(code), format));
  }
  return all;
}

// The nearest of ascending values; of two equally near ones, that with the even index.
int nearest(std::vector<float> const& values, double x) {
  int best = 0;
  for (int i = 1; i < int(values.size()); ++i) {
    double const old = std::abs(x - double(values[best])), now = std::abs(x - double(values[i]));
    if (now < old || (now == old && i % 2 == 0)) best = i;
  }
  return best;
}

// Every code's value, the midpoint to the next one, and both floats next to the midpoint.
template <class F>
void for_edges(std::vector<float> const& values, F&& f) {
  for (int i = 0; i < int(values.size()); ++i) {
    f(values[i]);
    float const next = i + 1 < int(values.size()) ? values[i + 1] : 2 * values[i];
    float const middle = values[i] + (next - values[i]) / 2;
    for (float const x : {middle, std::nextafter(middle, 0.f), std::nextafter(middle, 1e9f)}) f(x);
  }
}

TEST(Float8, CodesAreTheNearest) {
  for (Float8 const format : kFormats) {
    auto const values = values_of(format);
    EXPECT_EQ(values.back(), largest_of(format));
    for_edges(values, [&](float x) {
      int const want = nearest(values, x);
      EXPECT_EQ(encode_float8(x, format), want) << x;
      EXPECT_EQ(encode_float8(-x, format), want | 0x80) << x;
    });
    EXPECT_EQ(encode_float8(std::nanf(""), format), 0x7f);
    EXPECT_TRUE(std::isnan(decode_float8(0x7f, format)));
    EXPECT_EQ(encode_float8(INFINITY, format), format_of(format).largest);
    EXPECT_EQ(encode_float8(0x1p-140f, format), 0);
  }
}

// Codes multiplied by a quotient of scales: as elements, except that E5M2's infinities stay.
TEST(Float8, RescaledInfinitiesStay) {
  for (Float8 const format : kFormats) {
    for (int code = 0; code < 256; ++code) {
      float const value = decode_float8(uint8_t(code), format);
      int const same = std::isnan(value) ? 0x7f : code;
      EXPECT_EQ(encode_rescaled(value, format), same) << code;
      if (std::isinf(value)) continue;
      EXPECT_EQ(encode_rescaled(value * .3f, format), encode_float8(value * .3f, format)) << code;
    }
  }
  EXPECT_EQ(encode_rescaled(INFINITY, Float8::e5m2), kE5M2Infinity);
  EXPECT_EQ(encode_rescaled(-INFINITY, Float8::e5m2), kE5M2Infinity | 0x80);
  EXPECT_EQ(encode_rescaled(INFINITY, Float8::e4m3), 0x7e);  // E4M3 has none
  EXPECT_EQ(encode_rescaled(-INFINITY, Float8::e4m3), 0xfe);
}

TEST(Float8, ScalesBringTheLargestIntoRange) {
  for (Float8 const format : kFormats) {
    float const limit = largest_of(format);
    for (float const largest : {0.f, 0x1p-149f, 1e-20f, 1.f, 1.75f, 1.7500001f, limit, 3e38f}) {
      for (ScaleKind const kind : {ScaleKind::exact, ScaleKind::power_of_two}) {
        BlockScale const scale = block_scale(largest, format, kind);
        EXPECT_LE(largest * scale.to_code, limit * (1 + 1e-6f)) << largest;
        if (kind == ScaleKind::exact || largest < 0x1p-100f) continue;
        int exponent = 0;
        EXPECT_EQ(std::frexp(scale.to_value, &exponent), .5f) << largest;
        EXPECT_EQ(scale.to_value * scale.to_code, 1.f);
        EXPECT_GT(largest * scale.to_code * 2, limit) << largest;
      }
    }
    EXPECT_TRUE(std::isnan(block_scale(INFINITY, format, ScaleKind::exact).to_value));
    EXPECT_TRUE(std::isnan(block_scale(std::nanf(""), format, ScaleKind::exact).to_code));
  }
}

TEST(Microscaling, E2M1CodesAreTheNearest) {
  std::vector<float> const values{0, .5, 1, 1.5, 2, 3, 4, 6};
  for_edges(values, [&](float x) {
    int const want = nearest(values, x);
    EXPECT_EQ(encode_e2m1(x), want) << x;
    EXPECT_EQ(encode_e2m1(-x), want | 8) << x;
  });
  EXPECT_EQ(encode_e2m1(INFINITY), 7);
  EXPECT_EQ(encode_e2m1(-0.f), 8);
}

TEST(Microscaling, SharedExponents) {
  struct Case {
    float largest;
    int floor, ceil;  // exponents, of e4m3
  };
  for (Case const& c : {Case{256, 0, 0}, Case{448, 0, 0}, Case{449, 0, 1}, Case{511, 0, 1},
                        Case{512, 1, 1}, Case{1, -8, -8}, Case{0, -127, -127},
                        Case{0x1p-149f, -127, -127}, Case{0x1.fp127f, 119, 120}}) {
    MicroScale const floor = mx_scale(c.largest, Float8::e4m3, MicroRounding::floor);
    MicroScale const ceil = mx_scale(c.largest, Float8::e4m3, MicroRounding::ceil);
    EXPECT_EQ(floor.code, c.floor + 127) << c.largest;
    EXPECT_EQ(ceil.code, c.ceil + 127) << c.largest;
    EXPECT_EQ(floor.to_code, std::ldexp(1.f, -c.floor)) << c.largest;
    EXPECT_EQ(decode_e8m0(floor.code), std::ldexp(1.f, c.floor)) << c.largest;
  }
  EXPECT_EQ(mx_scale(INFINITY, Float8::e5m2, MicroRounding::floor).code, kE8M0NaN);
  EXPECT_TRUE(std::isnan(decode_e8m0(kE8M0NaN)));
  EXPECT_EQ(e8m0_quotient(100, 103), .125f);
  EXPECT_TRUE(std::isnan(e8m0_quotient(100, kE8M0NaN)));
}

TEST(Microscaling, NVFP4ScalesBringTheLargestToSix) {
  for (float const most : {1e-6f, 1.f, 37.f, 1e20f}) {
    float const global = nvfp4_global(most);
    MicroScale const scale = nvfp4_scale(most, global);
    EXPECT_EQ(scale.code, 0x7e) << most;  // 448
    EXPECT_NEAR(most * scale.to_code, 6, 1e-5) << most;
    EXPECT_EQ(nvfp4_scale(0, global).to_code, 0);
    EXPECT_EQ(nvfp4_scale(INFINITY, global).code, kE4M3NaN);
  }
  EXPECT_GT(nvfp4_global(0), 0);
}

TEST(Microscaling, NVFP4ScalesOfZerosAreZero) {
  for (float const global : {0.f, -0.f, 0x1p-149f, 1.f, INFINITY, std::nanf("")}) {
    MicroScale const scale = nvfp4_scale(0, global);
    EXPECT_EQ(scale.code, 0) << global;
    EXPECT_EQ(scale.to_code, 0) << global;
  }
}

TEST(Microscaling, RatiosAreThoseOfTwoDivisions) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 400'000; ++i) {
    // Any two positive floats, and often mantissas of ones, whose inverses are the least exact.
    auto const any = [&](int exponents) {
      uint32_t const mantissa = random() % 8 == 0 ? 0x7fffff - random() % 4 : random() % 0x800000;
      uint32_t const exponent = 127 - exponents / 2 + uint32_t(random() % exponents);
      return std::bit_cast<float>(exponent << 23 | mantissa);
    };
    int const exponents = i % 4 == 0 ? 254 : 40;
    float const largest = any(exponents), global = any(exponents);
    ASSERT_EQ(nvfp4_ratio(largest, global, 1 / global), largest / 6 / global)
        << largest << " over " << global;
  }
  EXPECT_EQ(nvfp4_ratio(0, 3, 1 / 3.f), 0);
}

TEST(Microscaling, SwizzledScalesHaveAPlaceEach) {
  for (int64_t const rows : {1, 128, 200}) {
    for (int64_t const blocks : {1, 4, 9}) {
      int64_t const size =
          micro_scale_bytes(rows, blocks * 32, Microscaling::mxfp8_e4m3, ScaleOrder::swizzled);
      std::set<int64_t> places;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t block = 0; block < blocks; ++block) {
          int64_t const place = scale_place(ScaleOrder::swizzled, row, block, blocks);
          EXPECT_LT(place, size);
          EXPECT_TRUE(places.insert(place).second) << row << " " << block;
        }
      }
    }
  }
  // The layout's own example: a tile's rows 32 apart are neighbours.
  EXPECT_EQ(scale_place(ScaleOrder::swizzled, 32, 0, 4), 4);
  EXPECT_EQ(scale_place(ScaleOrder::swizzled, 1, 2, 4), 18);
  EXPECT_EQ(scale_place(ScaleOrder::swizzled, 128, 5, 8), 3 * 512 + 1);
}

TEST(Float8Chunks, SlotsAreDistinctWhateverTheGroups) {
  for (auto const& counts :
       {std::vector<int64_t>{300, 0, 5, 128}, {1, 1, 1}, {0, 127, 129, 256}, {128, 128}, {0, 0}}) {
    int64_t begin = 0, last = -1, total = 0;
    for (int64_t const count : counts) total += count;
    for (int64_t e = 0; e < int64_t(counts.size()); begin += counts[e], ++e) {
      for (int64_t j = 0; j * kScaleBlock < counts[e]; ++j) {
        int64_t const slot = begin / kScaleBlock + e + j;
        EXPECT_GT(slot, last);
        EXPECT_LT(slot, chunk_slots(total, int64_t(counts.size())));
        last = slot;
      }
    }
  }
}

}  // namespace
}  // namespace guild
