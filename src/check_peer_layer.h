// Checks of the arguments of guild/peer_layer.h, for both backends: those of every step, before
// the first of them, for other ranks wait for a rank that stops halfway; and that steps read what
// those before them write.
#pragma once
#include "guild/peer_layer.h"

namespace guild {

void check(PeerForward const& x);
void check(PeerBackward const& x);

}  // namespace guild
