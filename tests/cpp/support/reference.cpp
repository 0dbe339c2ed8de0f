// Routings of the cases, and how far a result may be from the truth.
#include "reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <sstream>

#include "errors.h"

namespace guild::test {

namespace {

// Expert ids of every slot, as the case's routing says.
std::vector<int32_t> ids_of(Case const& c, std::mt19937_64& random) {
  int const tokens = int(c.sizes.tokens), experts = int(c.sizes.experts), k = int(c.sizes.top_k);
  std::vector<int32_t> ids(c.sizes.rows());
  if (c.routing.find('|') != std::string::npos) {
    std::stringstream counts(c.routing);
    size_t slot = 0;
    int32_t expert = 0;
    for (std::string count; std::getline(counts, count, '|'); ++expert) {
      for (int i = 0; i < std::stoi(count); ++i) ids.at(slot++) = expert;
    }
    EXPECT_EQ(slot, ids.size()) << c.name << ": the routing's rows are not tokens * top_k";
    if (!c.sorted) std::shuffle(ids.begin(), ids.end(), random);
    return ids;
  }
  std::vector<int32_t> order(experts);
  std::iota(order.begin(), order.end(), 0);
  if (c.routing == "even") std::erase_if(order, [](int32_t e) { return e % 2 == 1; });
  for (int t = 0; t < tokens; ++t) {
    std::shuffle(order.begin(), order.end(), random);
    for (int i = 0; i < k; ++i) {
      int32_t& id = ids[t * k + i];
      id = c.routing == "balanced" ? (t * k + i) % experts
           : c.routing == "one"    ? experts / 2
                                   : order[i];
      if (c.routing == "none" || (c.routing == "sentinel" && random() % 4 == 0)) {
        int32_t const outside[] = {experts, -1, 0x7fffffff, experts + 5, -0x7fffffff};
        id = outside[random() % 5];
      }
    }
  }
  return ids;
}

}  // namespace

Rowing rowing_of(Case const& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  Rowing r;
  r.ids = ids_of(c, random);
  int64_t const slots = c.sizes.rows();
  r.offsets.assign(1, 0);
  r.slot_row.assign(slots, -1);
  for (int32_t e = 0; e < c.sizes.experts; ++e) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (r.ids[slot] != e) continue;
      r.slot_row[slot] = int32_t(r.row_token.size());
      r.row_token.push_back(int32_t(slot / c.sizes.top_k));
      r.row_expert.push_back(e);
    }
    r.offsets.push_back(int32_t(r.row_token.size()));
  }
  r.row_token.resize(slots, 0);
  return r;
}

double relative_error(std::vector<double> const& out, std::vector<double> const& truth) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    difference += (out[i] - truth[i]) * (out[i] - truth[i]);
    size += truth[i] * truth[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / size);
}

void expect_close(std::vector<double> const& out, std::vector<double> const& truth,
                  std::vector<double> const& yardstick, DType stored, char const* name) {
  ASSERT_EQ(out.size(), truth.size()) << name;
  ASSERT_EQ(out.size(), yardstick.size()) << name;
  // Below a few roundings of the arithmetic the yardstick's error is luck; tensor cores cut the
  // last bits off their fp32 sums (docs/numerics.md).
  double const least = stored == DType::float64 ? 1e-14 : 5e-6;
  double const rounded = relative_error(yardstick, truth), allowed = std::max(2 * rounded, least);
  double const error = relative_error(out, truth);
  record_error(name, stored, error, rounded);
  EXPECT_TRUE(error <= allowed) << name << ": relative error " << error << ", allowed " << allowed;
  for (size_t i = 0; i < out.size(); ++i) {
    if (std::isnan(truth[i])) continue;
    ASSERT_FALSE(std::isnan(out[i])) << name << ": element " << i << " is NaN, not " << truth[i];
  }
}

}  // namespace guild::test
