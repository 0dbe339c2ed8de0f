// Checks of the arguments of guild/exchange.h, and the sizes of what ranks share.
#include "check_exchange.h"

#include "guild/error.h"
#include "shared/dtype.h"
#include "shared/peer_memory.h"

namespace guild {

namespace {

void require_experts(int64_t experts, PeerMemory const& memory) {
  require(experts >= memory.ranks && experts % memory.ranks == 0,
          "experts: expected a multiple of ", memory.ranks, " (ranks), got ", experts);
}

void require_slots(int64_t top_k, PeerMemory const& memory) {
  require(top_k >= 1 && top_k <= memory.top_k, "top_k: expected 1 to ", memory.top_k,
          " (what the ranks' memory has room for), got ", top_k);
}

void require_row(int64_t bytes, PeerMemory const& memory) {
  require(bytes >= 1 && bytes <= memory.row_bytes, "row_bytes: expected 1 to ", memory.row_bytes,
          " (what the ranks' memory has room for), got ", bytes);
}

void require_scores(int64_t bytes) {
  require(bytes == 4 || bytes == 8, "score_bytes: expected 4 or 8, got ", bytes);
}

}  // namespace

void check(PeerMemory const& m) {
  require(m.ranks >= 1 && m.ranks <= kMostRanks, "ranks: expected 1 to ", kMostRanks, ", got ",
          m.ranks);
  require(m.rank >= 0 && m.rank < m.ranks, "rank: expected 0 to ", m.ranks - 1, ", got ", m.rank);
  require(m.tokens >= 0 && m.top_k >= 1 && m.row_bytes >= 1 && m.returned >= 1,
          "memory: expected tokens >= 0 and top_k, row_bytes and returned >= 1, got ", m.tokens,
          ", ", m.top_k, ", ", m.row_bytes, " and ", m.returned);
  constexpr int64_t most = (int64_t(1) << 31) - 1;
  require(m.ranks * m.tokens * m.top_k <= most, "memory: expected at most ", most,
          " slots of all ranks (ranks * tokens * top_k), got ", m.ranks, " * ", m.tokens, " * ",
          m.top_k);
}

void check(Publish const& x) {
  check(x.memory);
  require(x.tokens >= 0 && x.tokens <= x.memory.tokens, "tokens: expected at most ",
          x.memory.tokens, " (what the ranks' memory has room for), got ", x.tokens);
  require_row(x.row_bytes, x.memory);
  if (x.ids == nullptr) return;
  require_slots(x.top_k, x.memory);
  require_experts(x.experts, x.memory);
  require_scores(x.score_bytes);
}

void check(Meet const& x) {
  check(x.memory);
  require(x.seconds > 0, "seconds: expected more than 0, got ", x.seconds);
  require(x.count >= 0 && x.count <= kMostFacts, "facts: expected at most ", kMostFacts, ", got ",
          x.count);
  require(x.report != nullptr, "report: expected memory of the host, got null");
}

void check(Tables const& x) {
  check(x.memory);
  require_slots(x.top_k, x.memory);
  require_experts(x.experts, x.memory);
  require_scores(x.score_bytes);
}

void check(Pull const& x) {
  check(x.memory);
  require_row(x.row_bytes, x.memory);
  require(x.top_k >= 1, "top_k: expected 1 or more, got ", x.top_k);
  require(x.part == Part::whole || x.first_experts >= 0, "first_experts: expected 0 or more, got ",
          x.first_experts);
}

void check(Push const& x) {
  check(x.memory);
  require_row(x.hidden * element_bytes(x.dtype), x.memory);
  int64_t const back = x.by_slot ? x.top_k : x.memory.ranks;
  require(back <= x.memory.returned, "returned: expected room for ", back,
          " rows a token in the ranks' memory, got ", x.memory.returned);
  require(!x.by_slot || (x.token_offsets == nullptr && x.scores == nullptr),
          "by_slot: expected neither scores nor lists of any length");
}

void check(Collect const& x) {
  check(x.memory);
  require_row(x.hidden * element_bytes(x.dtype), x.memory);
  require(x.tokens >= 0 && x.tokens <= x.memory.tokens, "tokens: expected at most ",
          x.memory.tokens, " (what the ranks' memory has room for), got ", x.tokens);
}

void check(PushScores const& x) {
  check(x.memory);
  require_slots(x.top_k, x.memory);
  require_scores(x.score_bytes);
}

void check(ReturnedScores const& x) {
  check(x.memory);
  require_scores(x.score_bytes);
  require(x.slots >= 0 && x.slots <= x.memory.tokens * x.memory.top_k, "slots: expected at most ",
          x.memory.tokens * x.memory.top_k, " (what the ranks' memory has room for), got ",
          x.slots);
}

int64_t peer_memory_bytes(PeerMemory const& memory) {
  check(memory);
  return layout_of(memory).bytes;
}
int64_t returned_rows_offset(PeerMemory const& memory) { return layout_of(memory).returned; }
int64_t returned_scores_offset(PeerMemory const& memory) {
  return layout_of(memory).returned_scores;
}

}  // namespace guild
