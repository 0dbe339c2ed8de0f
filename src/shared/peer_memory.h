// The layout of the memory through which ranks exchange rows (guild/exchange.h). Host and device.
//
//   control             counters, the failure, and an inbox with a message from every rank,
//                       double-buffered
//   ids, scores, rows   published data, double-buffered
//   returned            results for this rank's tokens, and gradients of their scores
//
// A "place" is the index of one of the two buffers. Barriers b and b + 2 use the same buffer of the
// inbox. No message is overwritten unread: another rank arrives at b + 2 only after it has met this
// one at b + 1, and this rank arrives there only after it has read all messages of b.
#pragma once
#include <algorithm>
#include <cstddef>

#include "guild/exchange.h"
#include "shared/host_device.h"

namespace guild {

inline constexpr uintptr_t kPeerAlignment = 16;  // bytes, of each rank's memory

struct PeerMessage {
  int64_t facts[kMostFacts];
  int64_t
      digest;  // facts_digest(); 0: the rank has failed. GPUs only, stored together with `arrived`
  int64_t arrived;  // the barrier's number
};

struct PeerControl {
  int64_t meetings;   // barriers passed
  int64_t published;  // of these, after publish(); the last one's place is (published - 1) % 2
  int64_t failure;    // packed(); 0: none. Other ranks write it too
  int64_t tokens[2];  // that are published
  int64_t stopped;    // whether a barrier has reported the failure: nothing is sent after it
  int64_t filler[10];
  PeerMessage inbox[2][kMostRanks];
};
// python/guild/distributed/peer_memory.py reads them.
static_assert(sizeof(PeerMessage) == 128 && offsetof(PeerControl, inbox) == 128);

// The call with facts past `count` set to 0, so that all can be compared.
inline Meet with_all_facts(Meet x) {
  std::fill(x.facts + x.count, x.facts + kMostFacts, 0);
  return x;
}

// A nonzero hash of facts. Facts that differ in one element have different hashes.
inline int64_t facts_digest(int64_t const (&facts)[kMostFacts]) {
  uint64_t digest = 0;
  for (int64_t const fact : facts) {
    digest = (digest ^ uint64_t(fact)) * 0xff51afd7ed558ccd;
    digest ^= digest >> 32;
  }
  return digest == 0 ? 1 : int64_t(digest);
}

// A failure in one word, so that another rank can write it atomically. rows < 2^31.
GUILD_HD int64_t packed(PeerFailure failure, int64_t rank, int64_t reporter, int64_t fact,
                        int64_t rows = 0) {
  return int64_t(failure) | rank << 8 | reporter << 16 | fact << 24 | rows << 32;
}
GUILD_HD PeerReport unpacked(int64_t word) {
  return {word & 255, word >> 8 & 255, word >> 16 & 255, word >> 24 & 255, word >> 32};
}

// Bytes from the beginning of a rank's memory, and the whole.
struct PeerLayout {
  int64_t ids, id_bytes, scores, score_bytes, rows, rows_bytes, returned, returned_scores, bytes;
};
GUILD_HD int64_t whole_units(int64_t bytes) { return (bytes + 255) / 256 * 256; }
GUILD_HD PeerLayout layout_of(PeerMemory const& m) {
  PeerLayout l;
  l.id_bytes = whole_units(m.tokens * m.top_k * 4);
  l.score_bytes = whole_units(m.tokens * m.top_k * 8);
  l.rows_bytes = whole_units(m.tokens * m.row_bytes);
  l.ids = whole_units(int64_t(sizeof(PeerControl)));
  l.scores = l.ids + 2 * l.id_bytes;
  l.rows = l.scores + 2 * l.score_bytes;
  l.returned = l.rows + 2 * l.rows_bytes;
  l.returned_scores = l.returned + whole_units(m.returned * m.tokens * m.row_bytes);
  l.bytes = l.returned_scores + l.score_bytes;
  return l;
}

// One rank's memory, seen from this one.
struct PeerView {
  PeerLayout const& layout;
  char* base;

  GUILD_HD PeerView(PeerLayout const& of_all, PeerMemory const& m, int64_t rank)
      : layout(of_all), base(static_cast<char*>(m.peers[rank])) {}
  GUILD_HD PeerControl* control() const { return reinterpret_cast<PeerControl*>(base); }
  GUILD_HD int32_t* ids(int64_t place) const {
    return reinterpret_cast<int32_t*>(base + layout.ids + place * layout.id_bytes);
  }
  GUILD_HD char* scores(int64_t place) const {
    return base + layout.scores + place * layout.score_bytes;
  }
  GUILD_HD char* rows(int64_t place) const {
    return base + layout.rows + place * layout.rows_bytes;
  }
  GUILD_HD char* returned() const { return base + layout.returned; }
  GUILD_HD char* returned_scores() const { return base + layout.returned_scores; }
};

// The place that publish() writes to next, and the one that it wrote to before the last barrier.
GUILD_HD int64_t next_place(PeerControl const* own) { return own->published & 1; }
GUILD_HD int64_t last_place(PeerControl const* own) { return (own->published - 1) & 1; }

// Whether global expert `id` belongs to rank r, with `local` experts per rank.
GUILD_HD bool lives_on(int64_t id, int64_t r, int64_t local) {
  return id >= r * local && id < (r + 1) * local;
}

}  // namespace guild
