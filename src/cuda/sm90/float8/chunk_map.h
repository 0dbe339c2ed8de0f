// The tensor map of chunks (guild/float8_chunks.h) that a down gradient stores, half of a chunk's
// rows at a time.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace guild::cuda {

// Codes (slots, halves * columns, 128) as (128, columns, halves, slots), in elements of two bytes,
// with boxes of 64 bytes and 128 columns, which lie in shared memory swizzled by 64 bytes.
CUtensorMap turned_map(uint8_t const* codes, int64_t columns, int halves, int64_t slots,
                       char const* name);

}  // namespace guild::cuda
