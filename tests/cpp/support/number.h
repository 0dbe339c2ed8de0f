// Element types as the tests see them: every value is a double on the host, rounded to its type and
// packed into bytes here, by arithmetic that shares nothing with the library.
#pragma once
#include <cstdint>

#include "guild/types.h"

namespace guild::test {

int64_t bytes_of(DType dtype);

// The nearest value of the type, ties to even; beyond the largest, infinity.
double round_to(DType dtype, double value);

// Bits of a value of the type, which must be representable, and back.
void encode(DType dtype, double value, void* out);
double decode(DType dtype, void const* in);

}  // namespace guild::test
