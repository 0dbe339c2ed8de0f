// The relative errors that the tests measure, for docs/numerics.md: with GUILD_ERRORS set in the
// environment the test program closes with a Markdown table of them.
#pragma once
#include "guild/types.h"

namespace guild::test {

// One comparison of the running test: error and yardstick's error of the value `name`.
void record_error(char const* name, DType stored, double error, double yardstick);

}  // namespace guild::test
