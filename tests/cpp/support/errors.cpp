// Collects errors by step, value, type and backend, and prints the worst of each.
#include "errors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>

#include "cases.h"

namespace guild::test {

namespace {

struct Worst {
  double error = 0, yardstick = 0;  // where the error is largest
  double ratio = 0;                 // largest of error / yardstick, of any case
};

using Key = std::tuple<std::string, std::string, std::string, std::string>;

std::map<Key, Worst>& table() {
  static std::map<Key, Worst> rows;
  return rows;
}

class Report : public testing::Environment {
 public:
  void TearDown() override {
    if (std::getenv("GUILD_ERRORS") == nullptr) return;
    std::printf("| step | value | type | backend | error | rounded reference | worst ratio |\n");
    std::printf("|---|---|---|---|---|---|---|\n");
    for (auto const& [key, worst] : table()) {
      auto const& [step, value, type, backend] = key;
      std::printf("| %s | %s | %s | %s | %.1e | %.1e | %.2f |\n", step.c_str(), value.c_str(),
                  type.c_str(), backend.c_str(), worst.error, worst.yardstick, worst.ratio);
    }
  }
};

[[maybe_unused]] testing::Environment* const kReport =
    testing::AddGlobalTestEnvironment(new Report);

}  // namespace

void record_error(char const* name, DType stored, double error, double yardstick) {
  auto const* const test = testing::UnitTest::GetInstance()->current_test_info();
  std::string const suite = test->test_suite_name(), full = test->name();  // step/case_..._backend
  std::string const backend = full.ends_with("cuda") ? "CUDA" : "CPU";
  std::string const step = suite.substr(suite.find('/') + 1) + "." + full.substr(0, full.find('/'));
  Worst& worst = table()[{step, name, name_of(stored), backend}];
  if (error > worst.error) worst.error = error, worst.yardstick = yardstick;
  if (yardstick > 0) worst.ratio = std::max(worst.ratio, error / yardstick);
}

}  // namespace guild::test
