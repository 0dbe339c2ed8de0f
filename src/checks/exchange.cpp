// Checks of the arguments of guild/exchange.h, and the sizes of what ranks share.
#include "checks/exchange.h"

#include "checks/conditions.h"
#include "shared/dtype.h"
#include "shared/peer_memory.h"

namespace guild {

namespace {

void require_experts(int64_t experts, PeerMemory const& memory) {
  require(experts >= memory.ranks && experts % memory.ranks == 0,
          "experts: expected a positive multiple of ", memory.ranks, " (ranks), got ", experts);
  check_size(experts / memory.ranks, 1, kMostExperts, "experts / ranks");
}

void require_slots(int64_t top_k, PeerMemory const& memory) {
  require(top_k >= 1 && top_k <= memory.top_k, "top_k: expected 1 to ", memory.top_k,
          " (what the ranks' memory has room for), got ", top_k);
}

void require_tokens(int64_t tokens, PeerMemory const& memory) {
  require(tokens >= 0 && tokens <= memory.tokens, "tokens: expected 0 to ", memory.tokens,
          " (what the ranks' memory has room for), got ", tokens);
}

void require_row(int64_t bytes, PeerMemory const& memory) {
  require(bytes >= 1 && bytes <= memory.row_bytes, "row_bytes: expected 1 to ", memory.row_bytes,
          " (what the ranks' memory has room for), got ", bytes);
}

void require_row(int64_t hidden, DType dtype, PeerMemory const& memory) {
  check_size(hidden, 1, kMostColumns, "hidden");
  check_dtype(dtype, "dtype");
  require_row(hidden * element_bytes(dtype), memory);
}

void require_returned(int64_t back, PeerMemory const& memory) {
  require(back <= memory.returned, "returned: expected room for ", back,
          " rows per token in the ranks' memory, got ", memory.returned);
}

void require_scores(int64_t bytes) {
  require(bytes == 4 || bytes == 8, "score_bytes: expected 4 or 8, got ", bytes);
}

void check_part(Part part) {
  require(int(part) >= 0 && int(part) <= int(Part::rest),
          "part: expected 0 (whole), 1 (first) or 2 (rest), got ", int(part));
}

// Checks the memory that a call works on; only a query of its size may leave out `peers`.
void check_mapped(PeerMemory const& m) {
  check(m);
  check_pointer(m.peers, true, "peers");
}

// Whether any rank may have tokens.
bool any_token(PeerMemory const& m) { return m.tokens > 0; }

}  // namespace

void check(PeerMemory const& m) {
  require(m.ranks >= 1 && m.ranks <= kMostRanks, "ranks: expected 1 to ", kMostRanks, ", got ",
          m.ranks);
  require(m.rank >= 0 && m.rank < m.ranks, "rank: expected 0 to ", m.ranks - 1, ", got ", m.rank);
  require(m.tokens >= 0 && m.top_k >= 1 && m.row_bytes >= 1 && m.returned >= 1,
          "memory: expected tokens >= 0 and top_k, row_bytes and returned >= 1, got ", m.tokens,
          ", ", m.top_k, ", ", m.row_bytes, " and ", m.returned);
  int64_t slots = 0, bytes = 0;
  bool const counted = !__builtin_mul_overflow(m.tokens, m.top_k, &slots) &&
                       !__builtin_mul_overflow(slots, m.ranks, &slots);
  require(m.tokens <= kMostRows && counted && slots <= kMostRows, "memory: expected at most ",
          kMostRows, " slots of all ranks (ranks * tokens * top_k), got ", m.ranks, " * ", m.tokens,
          " * ", m.top_k);
  // Published rows are double-buffered: all rows together take at most three times as much.
  bool const sized = !__builtin_mul_overflow(m.tokens, m.row_bytes, &bytes) &&
                     !__builtin_mul_overflow(bytes, m.returned, &bytes);
  require(sized && bytes < int64_t(1) << 60,
          "memory: expected fewer than 2^60 bytes of rows (tokens * row_bytes * returned), got ",
          m.tokens, " * ", m.row_bytes, " * ", m.returned);
}

void check(Publish const& x) {
  check_mapped(x.memory);
  require_tokens(x.tokens, x.memory);
  require_row(x.row_bytes, x.memory);
  check_pointer(x.rows, x.tokens > 0, "rows");
  require(x.row_stride >= x.row_bytes || x.tokens <= 1, "row_stride: expected at least row_bytes, ",
          x.row_bytes, ", got ", x.row_stride);
  check_reach({{{1, 0}, {x.tokens, x.row_stride}, {x.row_bytes, 1}}}, "rows");
  if (x.ids == nullptr) return;
  require_slots(x.top_k, x.memory);
  require_experts(x.experts, x.memory);
  require_scores(x.score_bytes);
  check_pointer(x.scores, x.tokens > 0, "scores");
  check_pointer(x.token_row, x.tokens > 0, "token_row");
}

void check(Meet const& x) {
  check_mapped(x.memory);
  require(x.seconds > 0, "seconds: expected more than 0, got ", x.seconds);
  check_size(x.count, 0, kMostFacts, "facts");
  require(x.report != nullptr, "report: expected host memory, got null");
}

void check(Tables const& x) {
  check_mapped(x.memory);
  require_slots(x.top_k, x.memory);
  require_experts(x.experts, x.memory);
  require_scores(x.score_bytes);
  check_pointer(x.ids, any_token(x.memory), "ids");
  check_pointer(x.scores, any_token(x.memory), "scores");
  check_pointer(x.tokens, true, "tokens");
}

void check(Pull const& x) {
  check_mapped(x.memory);
  require_row(x.row_bytes, x.memory);
  require_slots(x.top_k, x.memory);
  check_pointer(x.ids, any_token(x.memory), "ids");
  check_pointer(x.rows, any_token(x.memory), "rows");
  check_part(x.part);
  if (x.part != Part::whole) check_size(x.first_experts, 0, kMostExperts, "first_experts");
}

void check(Push const& x) {
  check_mapped(x.memory);
  require_row(x.hidden, x.dtype, x.memory);
  check_size(x.rows, 0, kMostRows, "rows");
  bool const lists = x.token_offsets != nullptr;
  require(!x.by_slot || (!lists && x.scores == nullptr),
          "by_slot: expected neither scores nor lists of variable length");
  if (!lists) require_slots(x.top_k, x.memory);
  require_returned(x.by_slot ? x.top_k : x.memory.ranks, x.memory);
  check_rows(x.y, x.rows, x.hidden, "y");
  check_pointer(x.row_of, any_token(x.memory) && (!lists || x.rows > 0), "row_of");
  check_pointer(x.tokens, any_token(x.memory) && !x.by_slot, "tokens");
  check_part(x.part);
  require(x.part == Part::whole || !x.by_slot, "part: expected 0 (whole) by slot, got ",
          int(x.part));
  check_pointer(x.rest_from, x.part != Part::whole, "rest_from");
}

void check(Collect const& x) {
  check_mapped(x.memory);
  require_row(x.hidden, x.dtype, x.memory);
  require_tokens(x.tokens, x.memory);
  require_returned(x.memory.ranks, x.memory);
  check_pointer(x.token_row, x.tokens > 0, "token_row");
  check_optional_rows(x.residual, x.tokens, x.hidden, "residual");
  check_pointer(x.o, x.tokens > 0, "o");
}

void check(PushScores const& x) {
  check_mapped(x.memory);
  require_slots(x.top_k, x.memory);
  require_scores(x.score_bytes);
  check_pointer(x.ids, any_token(x.memory), "ids");
  check_pointer(x.scores, any_token(x.memory), "scores");
}

void check(ReturnedScores const& x) {
  check_mapped(x.memory);
  require_scores(x.score_bytes);
  int64_t const most = x.memory.tokens * x.memory.top_k;
  require(x.slots >= 0 && x.slots <= most, "slots: expected 0 to ", most,
          " (what the ranks' memory has room for), got ", x.slots);
}

void check_collected(ReturnedScores const& x) {
  check(x);
  check_pointer(x.scores, x.slots > 0, "scores");
}

void check_peers(PeerMemory const& m) {
  for (int64_t r = 0; r < m.ranks; ++r) {
    require(m.peers[r] != nullptr, "memory.peers[", r, "]: expected the memory of rank ", r,
            ", got null");
    check_address(m.peers[r], kPeerAlignment, "memory.peers[", r, "]");
  }
}

int64_t peer_memory_bytes(PeerMemory const& memory) {
  check(memory);
  return layout_of(memory).bytes;
}
int64_t returned_rows_offset(PeerMemory const& memory) {
  check(memory);
  return layout_of(memory).returned;
}
int64_t returned_scores_offset(PeerMemory const& memory) {
  check(memory);
  return layout_of(memory).returned_scores;
}

}  // namespace guild
