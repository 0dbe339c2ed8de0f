// A layer whose experts are spread over ranks that reach each other's memory, forward and backward:
// the steps of guild/exchange.h and guild/steps.h in one call.
//
// On CUDA, rows travel while products run. The rows that the first experts need are pulled first;
// while these are multiplied, a few multiprocessors pull the others. Over many ranks, forward
// pushes the sums of tokens that have none of the last experts while these are multiplied. In
// backward, the tokens' gradients are pushed while the weights' gradients are computed. The overlap
// changes no result.
#pragma once
#include "guild/exchange.h"
#include "guild/steps.h"

namespace guild {

// Two more streams for a call on CUDA, which joins them, so that a graph that captures the call
// captures them too. Null: everything runs on the call's own stream.
struct PeerStreams {
  CUstream_st* link = nullptr;  // transfers of rows; of a higher priority than the others
  CUstream_st* side = nullptr;  // the second part of a product, and what is recomputed
  int32_t* counter = nullptr;   // (1) of the products on `side`: see cuda::Queue
};

struct PeerForward {
  Publish publish = {};
  Meet published = {};  // the barrier after it
  Tables tables = {};
  Pull pull = {};
  // For all ranks' tokens (ranks * Tm) and this rank's experts, with the sort; x: the pulled rows.
  // Neither o nor residual is used. Where its sizes have a room, `returned` compares the rows
  // needed, routing.offsets[experts], with it.
  MoeForward layer = {};
  Push push = {};  // y is in the layer's workspace
  Meet returned = {};
  Collect collect = {};
  Sort own = {};  // of this rank's tokens by all experts, for its offsets; null: not wanted
  PeerStreams streams = {};
  int64_t kept_rows = -1;  // that layer.h has memory for, as UpProjection::h_rows
};

struct PeerBackward {
  Publish publish = {};  // dO
  Meet published = {};
  Pull pull = {};
  // The up projection that recomputes the pre-activations, into the workspace; its h and a are
  // null.
  //   x.data null     layer.h has all pre-activations: nothing is recomputed
  //   kept_rows 0     layer.h is not used: all are recomputed
  //   kept_rows > 0   layer.h has so many rows: all are recomputed if the experts had more, which
  //                   only the device knows
  UpProjection again = {};
  int64_t kept_rows = 0;             // as in forward; not read where all were kept
  int32_t* again_offsets = nullptr;  // (experts + 1) of work memory, where kept_rows > 0
  MoeBackward layer = {};  // as in forward; dx_rows instead of dx, dscores of all ranks' slots
  Push push = {};          // dx_rows, where these are wanted
  PushScores scores = {};  // dscores, where these are wanted
  Meet returned = {};      // where either is wanted
  Collect collect = {};
  ReturnedScores own_scores = {};
  PeerStreams streams = {};
};

namespace cpu {
void peer_forward(PeerForward const& args);
void peer_backward(PeerBackward const& args);
}  // namespace cpu

namespace cuda {
void peer_forward(PeerForward const& args, Queue queue = {});
void peer_backward(PeerBackward const& args, Queue queue = {});
}  // namespace cuda

}  // namespace guild
