// The arguments of guild/exchange.h that its ops and those of a whole layer share, and an op of its
// sizes.
#pragma once
#include <tuple>
#include <vector>

#include "guild/exchange.h"
#include "torch/tensors.h"

namespace guild::binding {

using Numbers = std::vector<int64_t>;

// peers (ranks) int64 addresses; numbers: rank, tokens, top_k, row_bytes and returned.
PeerMemory memory_of(Place const& place, Tensor const& peers, Numbers const& numbers);

// An op without tensors -> bytes of a rank's memory, and the offsets of returned rows and scores in
// it
std::tuple<int64_t, int64_t, int64_t> peer_memory_sizes(int64_t ranks, Numbers memory);

struct Published {
  Publish args;
  Tensor token_row;  // (T, ranks); without ids (0, ranks)
  Tensor sent;       // whose rows args.rows are: those given, or a copy
};
// rows (T, H), ids (T, K) int32 and scores (T, K), both or none
Published publish_of(Place const& place, PeerMemory const& memory, Tensor const& rows,
                     MaybeTensor const& ids, MaybeTensor const& scores, int64_t experts);

// report (5) int64 on the host
Meet meet_of(PeerMemory const& memory, double seconds, Numbers const& facts, Tensor const& report);

}  // namespace guild::binding
