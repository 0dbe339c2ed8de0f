// The row stride of a matrix.
#pragma once
#include "guild/types.h"
#include "shared/host_device.h"

namespace guild {

// In elements; 0 in `rows` means packed rows.
GUILD_HD int64_t row_stride(ConstRows const& rows, int64_t columns) {
  return rows.stride == 0 ? columns : rows.stride;
}

}  // namespace guild
