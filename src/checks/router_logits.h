// The checks of the router's product. See check.h.
#pragma once
#include "checks/check.h"
#include "guild/router_logits.h"

namespace guild {

void check(RouterLogits const& x);

// Checks a product whose logits are routed at once and not kept.
void check_pair(RouterLogits const& product, Route const& route);

}  // namespace guild
