// Compiled for the compiler's default processor, unlike src/cpu, so that it runs everywhere.
#include "processor.h"

#include <string_view>

#include "guild/error.h"

namespace guild {

namespace {

// What -march=x86-64-v3 may use and older processors lack.
[[maybe_unused]] char const* missing_instructions() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return "AVX2";
  if (!__builtin_cpu_supports("fma")) return "FMA";
  if (!__builtin_cpu_supports("bmi2")) return "BMI2";
#endif
  return nullptr;
}

}  // namespace

void require_processor() {
  if constexpr (std::string_view(GUILD_CPU_ARCH) == "x86-64-v3") {
    static char const* const missing = missing_instructions();
    require(missing == nullptr, "processor: expected one with ", missing == nullptr ? "" : missing,
            ", as Guild's CPU backend was built for " GUILD_CPU_ARCH
            "; build with -DGUILD_CPU_ARCH=native on this machine");
  }
}

}  // namespace guild
