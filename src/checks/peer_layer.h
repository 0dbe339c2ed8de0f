// Checks of the arguments of guild/peer_layer.h, for both backends. All steps are checked before
// the first one runs, because the other ranks would wait for a rank that stops halfway. The checks
// also require that each step reads what the steps before it write.
#pragma once
#include "guild/peer_layer.h"

namespace guild {

void check(PeerForward const& x);
void check(PeerBackward const& x);

}  // namespace guild
