// Exchange of token rows between ranks that read and write each other's memory: the GPUs of one
// host with peer access, or processes that share memory.
//
// Every rank owns one buffer that all other ranks map; all have the same layout. Tokens pass
// through these buffers on the way to the experts and on the way back, each time with a barrier:
//
//   publish   copies this rank's rows, and in forward its routing, to its own buffer
//   meet      barrier
//   tables    reads all ranks' routing; numbers this rank's experts from 0, others become -1
//   pull      reads the rows of all tokens that have an expert on this rank, each once
//   ... the experts ...
//   push      writes results to the buffer of the rank that owns the token
//   meet      barrier
//   collect   sums each token's results over the ranks
//
// Only meet(), a single thread block on a GPU, waits for other ranks, and only for a limited time.
// Published data is double-buffered: a rank may publish again before all ranks have read its
// previous rows. guild/peer_layer.h runs the whole layer and overlaps transfers with products.
#pragma once
#include "guild/cuda.h"
#include "guild/types.h"

namespace guild {

inline constexpr int kMostRanks = 32;
inline constexpr int kMostFacts = 14;

// The buffers that ranks share, and the largest call for which they have room.
struct PeerMemory {
  int64_t ranks = 1, rank = 0;
  int64_t tokens = 0;     // Tm: most tokens of any rank
  int64_t top_k = 1;      // most experts per token
  int64_t row_bytes = 0;  // of the widest row
  int64_t returned = 1;   // most result rows per token: ranks, or top_k if pushed by slot
  // (ranks) the address of each rank's buffer in this process, 16-byte aligned. The CPU backend
  // throws Error if one is null or misaligned. On CUDA the list is in device memory, unchecked.
  void* const* peers = nullptr;
};

// The size of each rank's buffer, which must be zeroed before first use. This function and the next
// two do not read `peers`. As in all calls below, sizes whose product is too large throw Error.
int64_t peer_memory_bytes(PeerMemory const& memory);
// Byte offsets, in a rank's buffer, of what is returned for its tokens: rows, gradients of scores.
int64_t returned_rows_offset(PeerMemory const& memory);
int64_t returned_scores_offset(PeerMemory const& memory);

// Why the exchange failed: a rank is late, facts differ, or a rank needs too many rows.
enum class PeerFailure : int { none, late, differs, overflow };

// Failure record, in host memory that the device can write.
struct PeerReport {
  int64_t failure = 0;   // PeerFailure; written last
  int64_t rank = 0;      // the rank that is late, differs or had too many rows
  int64_t reporter = 0;  // the rank that noticed first
  int64_t fact = 0;      // index of the fact that differs
  int64_t rows = 0;      // rows that an overflow needed
};

// Publishes rows and, with ids, the routing of this rank's tokens. T <= Tm.
struct Publish {
  PeerMemory memory = {};
  int64_t tokens = 0, top_k = 1;
  int64_t experts = 1;  // of all ranks
  int64_t row_bytes = 0, score_bytes = 4;
  void const* rows = nullptr;    // (T) rows
  int64_t row_stride = 0;        // bytes from one to the next, at least row_bytes where T > 1
  int32_t const* ids = nullptr;  // (T, K); ids outside [0, experts) are skipped; null: none
  void const* scores = nullptr;  // (T, K)
  int32_t* token_row = nullptr;  // (T, ranks) out: where r's result for t returns, r T + t, or -1
};

// Barrier over all ranks. It also compares `facts`, numbers on which the ranks must agree. If facts
// differ, a rank is late or a rank needs too many rows, every rank reports it, returned results and
// pulled rows become NaN, and nothing is transferred from then on. Later calls do not wait and
// report the same failure.
struct Meet {
  PeerMemory memory = {};
  bool published = false;          // whether this barrier follows publish()
  double seconds = 0;              // timeout for all ranks together
  int64_t count = 0;               // number of facts
  int64_t facts[kMostFacts] = {};  // those past `count` are compared as 0
  PeerReport* report = nullptr;    // never null
  // (1) the number of rows needed; more than `capacity` is an overflow. Null: not checked.
  int32_t const* needed = nullptr;
  int64_t capacity = 0;
};

// Reads the routing of all ranks' tokens, Tm for each rank; slots past a rank's tokens are -1.
struct Tables {
  PeerMemory memory = {};
  int64_t top_k = 1, experts = 1, score_bytes = 4;
  int32_t* ids = nullptr;     // (ranks * Tm, K) out: local id of an expert of this rank, or -1
  void* scores = nullptr;     // (ranks * Tm, K) out; 0 where the id is -1
  int32_t* tokens = nullptr;  // (ranks) out: number of tokens of each rank
};

// How much of a step a call does: all of it, or one of two parts.
enum class Part : int { whole, first, rest };

// Pulls token rows: row r Tm + t is that of rank r's token t if the token has an expert on this
// rank, otherwise zeros. After a failure all rows are NaN.
//
// In two calls, Part::first pulls this rank's own tokens and those that have one of this rank's
// first experts, which is all that the products of these experts need; Part::rest pulls the others.
struct Pull {
  PeerMemory memory = {};
  int64_t top_k = 1, row_bytes = 0;
  int32_t const* ids = nullptr;  // (ranks * Tm, K) of Tables
  void* rows = nullptr;          // (ranks * Tm) rows out, packed
  Part part = Part::whole;
  int64_t first_experts = 0;  // number of first experts; not read with Part::whole
};

// Pushes results to the ranks that own the tokens. With p = r Tm + t for token t of the T_r tokens
// of rank r:
//   by token   sum over k of score[p, k] * y[row_of[p, k]], fp32, to row (this rank) T_r + t of r
//   by slot    y[row_of[p, k]] to row t K + k of r
// Nothing is pushed for a token without rows on this rank.
//
// A push by token can be split in two calls, the first of which may run before the last experts'
// rows exist: Part::first pushes the sums of tokens whose rows all lie before *rest_from,
// Part::rest those of the others. On CUDA, tokens with more than 32 slots are always in Part::rest.
struct Push {
  PeerMemory memory = {};
  DType dtype = DType::float32;
  int64_t hidden = 0, rows = 0, top_k = 1;
  bool by_slot = false;
  ConstRows y = {};                        // (rows, H)
  int32_t const* row_of = nullptr;         // (ranks * Tm, K), or (slots) with lists; -1: none
  void const* scores = nullptr;            // as row_of; null: 1, as it must be by slot
  int32_t const* token_offsets = nullptr;  // (ranks * Tm + 1) of lists of `rows` slots; null: none
  int32_t const* tokens = nullptr;         // (ranks) of Tables; not read by slot
  Part part = Part::whole;
  int32_t const* rest_from = nullptr;  // (1); not read with Part::whole
};

// o[t] = residual[t] + sum over ranks r of returned row token_row[t, r], in the order of the ranks,
// in fp32. Runs after the barrier that follows push().
struct Collect {
  PeerMemory memory = {};
  DType dtype = DType::float32;
  int64_t tokens = 0, hidden = 0;
  int32_t const* token_row = nullptr;  // (T, ranks) of Publish
  ConstRows residual = {};             // (T, H); null: none
  void* o = nullptr;                   // (T, H) out, packed
};

// Pushes gradients of scores: scores[p, k] to returned score t K + k of rank r, with p = r Tm + t,
// for all ids[p, k] >= 0.
struct PushScores {
  PeerMemory memory = {};
  int64_t top_k = 1, score_bytes = 4;
  int32_t const* ids = nullptr;  // (ranks * Tm, K) of Tables
  void const* scores = nullptr;  // (ranks * Tm, K)
};

// Gradients of scores returned for this rank's slots. Call clear_scores() before the barrier that
// precedes push_scores(), so that slots to which no rank pushes are zero.
struct ReturnedScores {
  PeerMemory memory = {};
  int64_t slots = 0, score_bytes = 4;
  void* scores = nullptr;  // (slots) out of collect_scores(); clear_scores() does not use it
};

namespace cpu {
void publish(Publish const& args);
void meet(Meet const& args);
void tables(Tables const& args);
void pull(Pull const& args);
void push(Push const& args);
void collect(Collect const& args);
void push_scores(PushScores const& args);
void clear_scores(ReturnedScores const& args);
void collect_scores(ReturnedScores const& args);
}  // namespace cpu

namespace cuda {
void publish(Publish const& args, Queue queue = {});
void meet(Meet const& args, Queue queue = {});
void tables(Tables const& args, Queue queue = {});
void pull(Pull const& args, Queue queue = {});
void push(Push const& args, Queue queue = {});
void collect(Collect const& args, Queue queue = {});
void push_scores(PushScores const& args, Queue queue = {});
void clear_scores(ReturnedScores const& args, Queue queue = {});
void collect_scores(ReturnedScores const& args, Queue queue = {});
}  // namespace cuda

}  // namespace guild
