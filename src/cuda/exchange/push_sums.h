// push() by token, of arguments that have been checked.
#pragma once
#include "guild/exchange.h"

namespace guild::cuda {

void push_sums(Push const& x, Queue const& queue);

}  // namespace guild::cuda
