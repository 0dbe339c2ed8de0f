// Checks of the arguments of guild/exchange.h, for both backends.
#pragma once
#include "guild/exchange.h"

namespace guild {

void check(PeerMemory const& memory);
void check(Publish const& x);
void check(Meet const& x);
void check(Tables const& x);
void check(Pull const& x);
void check(Push const& x);
void check(Collect const& x);
void check(PushScores const& x);
void check(ReturnedScores const& x);
void check_collected(ReturnedScores const& x);  // for collect_scores(), which needs `scores` too

// Checks the addresses of the ranks' memory, where the host can read the list of them.
void check_peers(PeerMemory const& memory);

}  // namespace guild
