// Memory of a step's operands on a device, and the comparison of two devices.
#include "twin.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace guild::test {

void* Operands::place(std::vector<std::byte> const& content) {
  Bytes& bytes = memory_.emplace_back(device_, int64_t(content.size()));
  bytes.write(content);
  return content.empty() ? nullptr : bytes.data();
}

void* Operands::output(char const* name, bool floats, std::vector<std::byte> const& start) {
  void* const data = place(start);
  outputs_.push_back({name, floats, start, &memory_.back()});
  return data;
}

void Operands::reset() {
  for (Output const& out : outputs_) const_cast<Bytes*>(out.bytes)->write(out.start);
}

std::vector<Left> Operands::left() const {
  std::vector<Left> all;
  for (Output const& out : outputs_) {
    EXPECT_TRUE(out.bytes->canaries_alive()) << out.name << ": written past its ends";
    all.push_back({out.name, out.floats, out.bytes->read()});
  }
  return all;
}

std::vector<Left> left_by(Device& device, Fill const& fill) {
  Operands operands(device);
  AnyStep const step = fill(operands);
  device.run(step);
  auto const first = operands.left();
  operands.reset();
  device.run(step);
  auto const second = operands.left();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(first[i].bytes == second[i].bytes) << first[i].name << " differs in a second run";
  }
  return first;
}

void expect_as_on_cpu(Device& device, Fill const& fill) {
  auto const got = left_by(device, fill), want = left_by(cpu_device(), fill);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (!got[i].floats) {
      EXPECT_TRUE(got[i].bytes == want[i].bytes) << got[i].name << ": other bits than on the CPU";
      continue;
    }
    auto const mine = got[i].as<float>(), theirs = want[i].as<float>();
    for (size_t j = 0; j < mine.size(); ++j) {
      bool const same = std::memcmp(&mine[j], &theirs[j], sizeof(float)) == 0;
      ASSERT_TRUE(same || (std::isnan(mine[j]) && std::isnan(theirs[j])))
          << got[i].name << "[" << j << "]: " << mine[j] << ", on the CPU " << theirs[j];
    }
  }
}

std::vector<std::byte> packed(DType dtype, std::vector<double> const& values) {
  int64_t const size = bytes_of(dtype);
  std::vector<std::byte> bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) encode(dtype, values[i], &bytes[i * size]);
  return bytes;
}

std::vector<std::byte> awkward(DType dtype, int64_t rows, int64_t columns, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> up_to_99(0, 99);
  bool const half = dtype == DType::float16;
  double const least = half ? 0x1p-24 : dtype == DType::bfloat16 ? 0x1p-133 : 0x1p-149;
  double const most = half ? 65504 : 0x1.fep127;
  std::vector<double> values(rows * columns);
  for (int64_t i = 0; i < rows; ++i) {
    double const size = std::ldexp(1, up_to_99(random) % 24 - 12);
    for (int64_t j = 0; j < columns; ++j) values[i * columns + j] = normal(random) * size;
    for (int64_t j = 0; j < columns; j += 16) {
      int const kind = up_to_99(random);
      for (int64_t k = j; k < std::min(j + 16, columns); ++k) {
        double& v = values[i * columns + k];
        if (kind < 8) v = std::copysign(0, v);
        if (kind >= 8 && kind < 14) v = least * std::nearbyint(normal(random) * 3);
        if (kind >= 14 && kind < 18) v = std::ldexp(v, half ? -8 : -100);
        if (kind == 18 && k == j) v = std::copysign(most, v);
        if (kind == 19 && k == j + 3) v = std::nan("");
        if (kind == 20 && k == j + 5) v = std::copysign(INFINITY, v);
      }
    }
  }
  for (double& v : values) v = round_to(dtype, v);
  return packed(dtype, values);
}

std::vector<std::byte> normal(DType dtype, int64_t rows, int64_t columns, uint64_t seed,
                              double scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, scale);
  std::vector<double> values(rows * columns);
  for (double& v : values) v = round_to(dtype, normal(random));
  return packed(dtype, values);
}

}  // namespace guild::test
