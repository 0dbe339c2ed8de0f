// How far the rows of a matrix lie apart.
#pragma once
#include "guild/types.h"
#include "shared/host_device.h"

namespace guild {

// In elements; a stride of 0 stands for rows without gaps.
GUILD_HD int64_t row_stride(ConstRows const& rows, int64_t columns) {
  return rows.stride == 0 ? columns : rows.stride;
}

}  // namespace guild
