// The checks of microscaling formats. See check.h.
#pragma once
#include "guild/microscaling.h"

namespace guild {

void check(QuantizeMicro const& x);
void check(RegroupMicro const& x);

}  // namespace guild
