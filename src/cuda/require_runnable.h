// The steps' argument requirements on CUDA: check(), and what the kernels need beyond it, such as
// alignment. Each step calls its own. Forward, backward and a multi-rank layer call those of all
// their steps before the first one runs: an error is raised before anything is written, and no rank
// waits for one that stopped halfway.
#pragma once
#include "guild/peer_layer.h"

namespace guild::cuda {

void require_runnable(Sort const& x);
void require_runnable(UpProjection const& x);
void require_runnable(DownProjection const& x);
void require_runnable(Combine const& x);
void require_runnable(DownGradient const& x);
void require_runnable(ScoreGradient const& x);
void require_runnable(UpGradient const& x);
void require_runnable(UpWeightGradient const& x);
void require_runnable(DownWeightGradient const& x);
void require_runnable(MoeWeightGradients const& x);

void require_runnable(Publish const& x);
void require_runnable(Meet const& x);
void require_runnable(Tables const& x);
void require_runnable(Pull const& x);
void require_runnable(Push const& x);
void require_runnable(Collect const& x);
void require_runnable(PushScores const& x);
void require_runnable(ReturnedScores const& x);

}  // namespace guild::cuda
