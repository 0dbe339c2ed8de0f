// Division that rounds up.
#pragma once
#include <cstdint>

#include "shared/host_device.h"

namespace guild {

// x / y, rounded up; for x >= 0 and y > 0.
GUILD_HD constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

}  // namespace guild
