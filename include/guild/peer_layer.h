// An expert-parallel layer over ranks that map each other's memory, forward and backward: the steps
// of guild/exchange.h and guild/steps.h in one call.
//
// On CUDA, transfers overlap with matrix products. The rows of the first experts are pulled first;
// while these experts' products run, a few SMs pull the other rows. Over many ranks, forward pushes
// the results of tokens that have none of the last experts while the products of those experts run.
// Backward pushes the tokens' gradients while it computes weight gradients. The overlap changes no
// result.
#pragma once
#include "guild/exchange.h"
#include "guild/steps.h"

namespace guild {

// Two more streams for a call on CUDA. The call forks from its own stream to them and joins them
// again, so capturing the call captures them too. Null: everything runs on the call's own stream.
struct PeerStreams {
  CUstream_st* link = nullptr;  // transfers; needs a higher priority than the other streams
  CUstream_st* side = nullptr;  // the second part of a product, and what is recomputed
  int32_t* counter = nullptr;   // (1) of the products on `side`: see cuda::Queue
};

struct PeerForward {
  Publish publish = {};
  Meet published = {};  // the barrier after it
  Tables tables = {};
  Pull pull = {};
  // This rank's experts on all ranks' tokens (T = ranks * Tm), with the sort. x: the pulled rows. o
  // and residual are not used. With sizes.room, `returned` must compare the number of rows needed,
  // routing.offsets[experts], with it.
  MoeForward layer = {};
  Push push = {};  // y is not read: it lies in the layer's workspace
  Meet returned = {};
  Collect collect = {};
  Sort own = {};  // of this rank's tokens by all ranks' experts; null offsets: not wanted
  PeerStreams streams = {};
  int64_t kept_rows = -1;  // rows that layer.h has memory for, as UpProjection::h_rows
};

struct PeerBackward {
  Publish publish = {};  // dO
  Meet published = {};
  Pull pull = {};
  // The up projection that recomputes the pre-activations H into the workspace; its h and a are
  // null.
  //   x.data null     layer.h holds all of H: nothing is recomputed
  //   kept_rows 0     layer.h is not used: all of H is recomputed
  //   kept_rows > 0   layer.h holds that many rows: if the experts had more, which only the device
  //                   knows, all of H is recomputed
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
